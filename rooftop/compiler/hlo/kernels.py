"""Hand-written kernels in HLO: the FLOPs that their program declares, since the compiler counts none, and their price.

Around each kernel the program opens a named scope such as ``kernel_flops[fwd=4000000,dq=6000000]``: the FLOPs of one
execution on one device, keyed by a word of the kernel's name; ``each`` matches any (see ``programs.attention.attend``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rooftop.compiler.hlo.text import HloComputation, Instruction
from rooftop.roofline.achievable import MEASURED_DIMS, kernel_flops, matmul_fraction
from rooftop.roofline.rates import Rates

_DECLARED = re.compile(r"kernel_flops\[([^\]]*)\]")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
#: Words with which attention kernels declare their FLOPs; true for those of the backward pass.
_ATTENTION = {"fwd": False, "dq": True, "dkv": True, "bwd": True}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One execution of a kernel on one device: ``flops`` as declared (None: not declared) under ``word``.

    ``head_sizes`` are those of a query and of a value head, if it is an attention kernel.
    """

    flops: float | None = None
    word: str = ""
    head_sizes: tuple[int, int] = (0, 0)

    def expected_s(self, rates: Rates) -> float:
        """Expected seconds on the matrix unit; 0 if no FLOPs are declared.

        An attention kernel runs at the fraction measured for the chip (docs/achievable.md), forward or backward; any
        other kernel as fast as a large matmul.
        """
        if self.flops is None:
            return 0.0
        chip = rates.chip
        if self.word in _ATTENTION:
            backward = _ATTENTION[self.word]
            per_score = kernel_flops(chip, *self.head_sizes, backward=backward)
            return self.flops / per_score * float(rates.attention_s(1.0, *self.head_sizes, backward=backward))
        large = MEASURED_DIMS[1]
        return self.flops / (rates.flops_per_s["bf16"] * float(matmul_fraction(chip.name, large, large, large)))


def kernel(computation: HloComputation, instruction: Instruction) -> Kernel | None:
    """The Pallas or cuDNN kernel that an instruction calls; None if it calls none."""
    if not _is_kernel(instruction):
        return None
    declaration = _declaration(instruction)
    if declaration is None:
        return Kernel()
    word, flops = declaration
    return Kernel(flops=flops, word=word, head_sizes=_head_sizes(computation, instruction))


def declared_flops(instruction: Instruction) -> float | None:
    """FLOPs of one execution of a kernel on one device, as its program declares them; None without a declaration."""
    declaration = _declaration(instruction) if _is_kernel(instruction) else None
    return None if declaration is None else declaration[1]


def _is_kernel(instruction: Instruction) -> bool:
    target = _target(instruction)
    return target == "tpu_custom_call" or target.startswith("__cudnn$")


def _declaration(instruction: Instruction) -> tuple[str, float] | None:
    """The word that identifies a kernel, and its FLOPs, from the innermost declaration."""
    declarations = _DECLARED.findall(instruction.op_name)
    declared = dict(part.split("=", 1) for part in declarations[-1].split(",") if "=" in part) if declarations else {}
    words = _words(instruction)
    return next(((word, float(flops)) for word, flops in declared.items() if word in words), None)


def _words(instruction: Instruction) -> set[str]:
    target = _target(instruction)
    if target != "tpu_custom_call":
        return {"bwd" if target.endswith("Backward") else "fwd", "each"}
    called = re.search(r"([^/]+)/pallas_call", instruction.op_name)
    name = called.group(1) if called else instruction.name.split(".")[0]
    return {*name.split("_"), "each"}


def _head_sizes(computation: HloComputation, instruction: Instruction) -> tuple[int, int]:
    """Sizes of a query and of a value head: the minor dims of the first and of the third array of heads (q, k, v)."""
    operands = computation.operands(instruction)
    arrays = [tensor for operand in operands for tensor in operand.shape if len(tensor.dims) >= 3]
    sizes = [tensor.dims[-1] for tensor in arrays if tensor.dtype in ("bf16", "f16", "f32")]
    return (sizes[0], sizes[2]) if len(sizes) > 2 else (0, 0)


def _target(instruction: Instruction) -> str:
    match = _TARGET.search(instruction.attributes) if instruction.opcode == "custom-call" else None
    return match.group(1) if match else ""
