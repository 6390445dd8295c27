"""FLOPs and bytes of hand-written kernels, in which XLA counts none.

The FLOPs of a kernel have the first of these that there is as evidence:

- *declared*: its program declares the FLOPs of one execution on one device in a named scope around each, such as
  ``kernel_flops[fwd=4000000,dq=6000000]``, keyed by a word of the kernel's name; ``each`` matches any (see
  ``programs.attention.attend``);
- *body*: the matmuls of its Mosaic body in all steps of its grid, if the control flow follows from constants
  (``rooftop.compiler.hlo.mosaic``);
- *estimate*: the ``cost_estimate`` with which the program calls it;
- *shapes*: kernels whose work depends on data, by a formula on their operands;
- *body*, with a ``limit``: 'at most' if a branch on data counts as taken.

Any other kernel has unknown FLOPs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rooftop.compiler.hlo.mosaic import KernelTable, read_kernel
from rooftop.compiler.hlo.text import HloComputation, HloTensor, Instruction, Module
from rooftop.roofline.achievable import MEASURED_DIMS, kernel_flops, matmul_fraction
from rooftop.roofline.rates import Rates

CUBLAS, CUDNN = "__cublas$", "__cudnn$"
_MOSAIC = "tpu_custom_call"
#: Targets of Pallas kernels for GPUs, whose bodies are not read.
_GPU_KERNELS = ("__gpu$xla.gpu.triton", "triton_kernel_call", "mosaic_gpu")

_DECLARED = re.compile(r"kernel_flops\[([^\]]*)\]")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
#: Words of attention kernels; true for those of the backward pass.
_ATTENTION = {"fwd": False, "dq": True, "dkv": True, "bwd": True}
#: Names of attention kernels for TPUs whose operands are q, k and v.
_ATTENTION_KERNELS = re.compile(r"splash|flash_attention")

#: The evidence for a kernel's FLOPs; '': none.
KernelEvidence = Literal["declared", "body", "estimate", "shapes", ""]
#: 'at most': work that depends on data counts as if all of it were done; '': the FLOPs are those of any execution.
KernelLimit = Literal["", "at most"]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One execution of a kernel on one device: ``flops`` (None: unknown) by ``evidence``.

    ``word`` is that of a declaration or of an attention kernel. ``head_sizes`` are those of a query and of a value
    head, ``queries`` the (query, head) pairs, if it is an attention kernel. ``hbm_bytes`` are those of its estimate
    (None: without one).
    """

    flops: float | None = None
    evidence: KernelEvidence = ""
    limit: KernelLimit = ""
    hbm_bytes: float | None = None
    word: str = ""
    head_sizes: tuple[int, int] = (0, 0)
    queries: int = 0

    def expected_s(self, rates: Rates) -> float:
        """Expected seconds on the matrix unit; 0 if the FLOPs are unknown.

        An attention kernel runs at the fraction measured for the chip (docs/evidence/achievable.md), forward or
        backward; any other kernel as fast as a large matmul.
        """
        if self.flops is None:
            return 0.0
        chip = rates.chip
        if self.word in _ATTENTION:
            backward = _ATTENTION[self.word]
            per_score = kernel_flops(chip, *self.head_sizes, backward=backward)
            scores = self.flops / per_score
            return float(rates.attention_s(scores, *self.head_sizes, backward=backward, queries=self.queries))
        large = MEASURED_DIMS[1]
        return self.flops / (rates.flops_per_s["bf16"] * float(matmul_fraction(chip, large, large, large)))


def kernel(module: Module, computation: HloComputation, instruction: Instruction) -> Kernel | None:
    """The Pallas or cuDNN kernel that an instruction calls; None if it calls none."""
    if not _is_kernel(instruction):
        return None
    declaration = _declaration(instruction)
    if declaration is not None:
        word, flops = declaration
        return Kernel(flops=flops, evidence="declared", word=word, **_heads(computation, instruction))
    if target(instruction) != _MOSAIC:
        return Kernel()
    key = computation.name, instruction.name
    return module.remember("kernel", key, lambda: _counted(module, computation, instruction))


def target(instruction: Instruction) -> str:
    """The target of a custom call; '' for other instructions."""
    match = _TARGET.search(instruction.attributes) if instruction.opcode == "custom-call" else None
    return match.group(1) if match else ""


def _is_kernel(instruction: Instruction) -> bool:
    called = target(instruction)
    return called == _MOSAIC or called.startswith((CUDNN, *_GPU_KERNELS))


def _declaration(instruction: Instruction) -> tuple[str, float] | None:
    """The word that identifies a kernel, and its FLOPs, from the innermost declaration."""
    declarations = _DECLARED.findall(instruction.op_name)
    declared = dict(part.split("=", 1) for part in declarations[-1].split(",") if "=" in part) if declarations else {}
    words = _words(instruction)
    return next(((word, float(flops)) for word, flops in declared.items() if word in words), None)


def _words(instruction: Instruction) -> set[str]:
    called = target(instruction)
    if called != _MOSAIC:
        return {"bwd" if called.endswith("Backward") else "fwd", "each"}
    return {*kernel_name(instruction).split("_"), "each"}


def kernel_name(instruction: Instruction) -> str:
    """The name of a Pallas kernel, or of the custom call that calls it."""
    called = re.search(r"(?<![^/()])([^/()]+)\)?/pallas_call", instruction.op_name)
    return called.group(1) if called else instruction.name.split(".")[0]


def _heads(computation: HloComputation, instruction: Instruction) -> dict[str, Any]:
    """Sizes of a query and of a value head, minor dims of the first and third array of heads (q, k, v); queries."""
    operands = computation.operands(instruction)
    arrays = [tensor for operand in operands for tensor in operand.shape if len(tensor.dims) >= 3]
    heads = [tensor.dims for tensor in arrays if tensor.dtype in ("bf16", "f16", "f32")]
    if len(heads) < 3:
        return {}
    return {"head_sizes": (heads[0][-1], heads[2][-1]), "queries": math.prod(heads[0][:-1])}


def _counted(module: Module, computation: HloComputation, instruction: Instruction) -> Kernel:
    """A Mosaic kernel without a declaration."""
    estimate = _estimate(instruction)
    hbm_bytes = estimate.get("bytes_accessed") or None
    attends = _attention(computation, instruction)
    body = _body(module, computation, instruction)
    if body is not None and not body.uncounted and not body.at_most:
        total = sum(body.flops.values())
        if total or not estimate.get("flops"):
            return Kernel(flops=total, evidence="body", hbm_bytes=hbm_bytes, **attends)
    if estimate.get("flops"):
        return Kernel(flops=estimate["flops"], evidence="estimate", hbm_bytes=hbm_bytes, **attends)
    shapes = _by_shapes(computation, instruction)
    if shapes is not None:
        return Kernel(flops=shapes[0], limit=shapes[1], evidence="shapes", hbm_bytes=hbm_bytes)
    if body is not None and not body.uncounted:
        return Kernel(flops=sum(body.flops.values()), evidence="body", limit="at most", hbm_bytes=hbm_bytes, **attends)
    return Kernel(hbm_bytes=hbm_bytes)


def _attention(computation: HloComputation, instruction: Instruction) -> dict[str, Any]:
    """Word, head sizes and queries of an attention kernel; nothing for other kernels."""
    name = kernel_name(instruction)
    heads = _heads(computation, instruction) if _ATTENTION_KERNELS.search(name) else {}
    words = name.split("_")
    return {"word": next((word for word in _ATTENTION if word in words), "fwd"), **heads} if heads else {}


def _estimate(instruction: Instruction) -> Mapping[str, float]:
    match = re.search(r'"cost_estimate":(\{[^{}]*\})', instruction.attributes)
    return {name: float(value) for name, value in json.loads(match.group(1)).items()} if match else {}


def _body(module: Module, computation: HloComputation, instruction: Instruction) -> Any:
    match = re.search(r'"body":"([^"]*)"', instruction.attributes)
    if match is None:
        return None
    operands = computation.operands(instruction)
    # Sizes of the dims of a grid that are not constant come first, as scalars; then the tables in scalar memory.
    first = next((at for at, item in enumerate(operands) if item.shape and item.shape[0].dims), len(operands))
    dynamic = [_table(module, computation, item) for item in operands[:first]]
    sizes = tuple(None if item is None else int(np.frombuffer(item[0], np.int64)[0]) for item in dynamic)
    tables = tuple(_table(module, computation, item) for item in operands[first:])
    return read_kernel(match.group(1), tables, sizes)


_INTEGERS = ("s8", "u8", "s16", "u16", "s32", "u32", "pred")
#: Opcodes that keep the elements of a table and their order.
_KEEP = ("copy", "copy-start", "copy-done", "optimization-barrier", "reshape", "bitcast")
_FAR = 30


def _table(module: Module, computation: HloComputation, source: Instruction) -> KernelTable:
    """The integers of an operand that is a constant, through copies and the carries of loops; None if it is none."""
    operand = source.shape[0] if source.shape else HloTensor("", ())
    if operand.dtype not in _INTEGERS:
        return None
    for _ in range(_FAR):
        if source.opcode == "constant":
            numbers = _integers(source.literal)
            if numbers is None or len(numbers) != operand.elements:
                return None
            return numbers.tobytes(), operand.dims
        if source.opcode in _KEEP and source.operands:
            before = computation.operands(source)[0]
            dims, dims_before = ([dim for dim in item.shape[0].dims if dim != 1] for item in (source, before))
            # A bitcast may transpose, if another dim of the layout is minor.
            if source.opcode == "bitcast" and dims != dims_before:
                return None
            source = before
        elif source.opcode == "get-tuple-element":
            step = _element(module, computation, source)
            if step is None:
                return None
            computation, source = step
        else:
            return None
    return None


def _element(
    module: Module, computation: HloComputation, source: Instruction
) -> tuple[HloComputation, Instruction] | None:
    """The origin of an element of a tuple; of the carry of a loop, if the body passes it on unchanged."""
    index, origin = int(source.attribute("index")), computation.operands(source)[0]
    if origin.opcode == "tuple":
        return computation, computation.operands(origin)[index]
    if origin.opcode != "parameter":
        return None
    for caller, loop in module.callers.get(computation.name, ()):
        body = module.computations[loop.called_as("body")] if loop.opcode == "while" else None
        if body is not computation:
            continue
        root = body.instructions[body.root]
        start = caller.operands(loop)[0]
        if root.opcode == "tuple" and start.opcode == "tuple" and _passes_on(body, body.operands(root)[index], index):
            return caller, caller.operands(start)[index]
    return None


def _passes_on(body: HloComputation, result: Instruction, index: int) -> bool:
    while result.opcode in ("copy", "bitcast") and result.operands:
        result = body.operands(result)[0]
    unchanged = result.opcode == "get-tuple-element" and int(result.attribute("index")) == index
    return unchanged and body.operands(result)[0].opcode == "parameter"


def _integers(literal: str) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """The integers of a constant; None if its text has left them out, or has others."""
    words = re.sub(r"[{},]", " ", literal).split()
    names = {"false": 0, "true": 1}
    try:
        return np.array([names[word] if word in names else int(word) for word in words], np.int64)
    except ValueError:
        return None


def _by_shapes(computation: HloComputation, instruction: Instruction) -> tuple[float, KernelLimit] | None:
    """FLOPs of JAX's kernels whose work depends on data, from the shapes of their operands; None for other kernels.

    A grouped matmul multiplies each of its m rows with one matrix: 2 m k n. A paged attention has at most the scores of
    every query token with all keys that fit into the pages of its sequence.
    """
    words = kernel_name(instruction).split("_")
    arrays = [tensor for operand in computation.operands(instruction) for tensor in operand.shape]
    floats = [tensor.dims for tensor in arrays if tensor.dtype not in _INTEGERS]
    if ("gmm" in words or "tgmm" in words) and len(floats) >= 2 and len(floats[0]) == 2 and instruction.shape:
        out = instruction.shape[0].dims
        if "gmm" in words and len(out) == 2:
            return 2.0 * math.prod(out) * math.prod(floats[0]) / out[0], ""
        if "tgmm" in words and len(out) == 3:
            return 2.0 * math.prod(floats[0]) * out[-1], ""
    if {"paged", "attention"} <= set(words):
        indices = [item for item in arrays if item.dtype in _INTEGERS]
        queries = next((dims for dims in floats if len(dims) >= 3), None)
        cache = next((dims for dims in floats[1:] if len(dims) == 4), None)
        if not indices or queries is None or cache is None:
            return None
        # The largest table has the pages of every sequence. A ragged batch has one row of it for each sequence, any
        # other one query a sequence. Caches are [pages, page, heads, H] or [heads, pages, page, H].
        ragged = "ragged" in words
        pages = max(indices, key=lambda item: item.elements)
        sequences = pages.dims[0] if ragged else queries[0]
        keys = pages.elements / sequences * cache[1 if ragged else 2]
        return 4.0 * math.prod(queries) * keys, "at most"
    return None
