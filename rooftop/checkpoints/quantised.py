"""Checkpoints with quantised matrices, read as plain ones: every part is dequantised as it is read.

The layouts are those of the published files: scales next to an FP8 matrix, MXFP4 blocks and their exponents, and int32
words of GPTQ, AWQ and compressed-tensors. Values are those of transformers and of the libraries that it calls: FP8 and
MXFP4 in bf16, whole numbers in the dtype of their scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from rooftop.checkpoints.huggingface_files import Checkpoint
from rooftop.checkpoints.names import Array
from rooftop.core.errors import RooftopError
from rooftop.core.rounding import ceil_div
from rooftop.models.config import StoredFormat
from rooftop.models.huggingface import stored_format
from rooftop.models.stored import MXFP4_GROUP

_BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
#: Values of the 256 bytes of e4m3, and of the 16 halves of a byte of e2m1.
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_EXPONENT_BIAS = 127
#: Column of each value of AWQ's words, lowest bits first.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
#: Suffixes of the scales of an FP8 matrix: block by block, and of a matrix or its outputs.
_FP8_SCALES = ("_scale_inv", "_scale")


def open_weights(folder: Path) -> Checkpoint:
    """The checkpoint in ``folder``, whose quantised matrices are read as if they were plain.

    Raises RooftopError for files that are missing or damaged, and for a ``quantization_config`` that is not read;
    ``check`` raises it for tensors that are not as the config says.
    """
    plain, stored = Checkpoint.open(folder), stored_format(folder)
    if stored is None:
        return plain
    return _Dequantised(folder=folder, tensors=plain.tensors, matrices=_matrices(plain, stored))


@dataclass(frozen=True, kw_only=True)
class _Dequantised(Checkpoint):
    """A checkpoint with quantised ``matrices``, by the names that they have where they are plain."""

    matrices: Mapping[str, _Matrix]

    def __contains__(self, name: str) -> bool:
        return name in self.matrices or super().__contains__(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        return self.matrices[name].dtype if name in self.matrices else super().dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.matrices[name].shape if name in self.matrices else super().shape(name)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        if name in self.matrices:
            self.matrices[name].check()
        super().check(name, shape)

    def read(self, name: str, region: tuple[slice, ...]) -> Array:
        if name not in self.matrices:
            return super().read(name, region)
        matrix = self.matrices[name]
        spans = [part.indices(size) for part, size in zip(region, matrix.shape, strict=True)]
        whole = matrix.read(tuple(slice(start, stop) for start, stop, _ in spans))
        part: Array = whole[tuple(slice(None, None, step) for _, _, step in spans)]
        return part


def group_scales(files: Checkpoint, group: int | None) -> Checkpoint:
    """The scales of the matrices of ``files`` that have one for each output and ``group`` inputs (None: all inputs).

    Tensors have the names and shapes of these matrices, but one element for each group of inputs, in float32. Matrices
    with zero points are left out, and those with part of a group.
    """
    matrices = files.matrices if isinstance(files, _Dequantised) else {}
    scaled = {name: matrix for name, matrix in matrices.items() if matrix.in_groups_of(group)}
    return _GroupScales(folder=files.folder, tensors={}, matrices=scaled)


@dataclass(frozen=True, kw_only=True)
class _GroupScales(Checkpoint):
    """See ``group_scales``."""

    matrices: Mapping[str, _Matrix]

    def __contains__(self, name: str) -> bool:
        return name in self.matrices

    def dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(np.float32)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.matrices[name].groups_shape

    def read(self, name: str, region: tuple[slice, ...]) -> Array:
        return self.matrices[name].group_scales(region)


def _matrices(files: Checkpoint, stored: StoredFormat) -> dict[str, _Matrix]:
    matrices = dict[str, _Matrix]()
    for name, (_, code, _) in files.tensors.items():
        match stored.method:
            case "mxfp4" if name.endswith("_blocks"):
                plain = name.removesuffix("_blocks")
                matrices[plain] = _Mxfp4(files=files, name=plain)
            case "fp8" if code == "F8_E4M3":
                matrices[name] = _Fp8(files=files, name=name, block=stored.block)
            case "gptq" if name.endswith(".qweight"):
                plain = name.removesuffix(".qweight")
                matrices[f"{plain}.weight"] = _Gptq(files=files, name=plain, stored=stored)
            case "awq" if name.endswith(".qweight"):
                plain = name.removesuffix(".qweight")
                matrices[f"{plain}.weight"] = _Awq(files=files, name=plain, stored=stored)
            case "packed" if name.endswith("_packed"):
                plain = name.removesuffix("_packed")
                matrices[plain] = _Packed(files=files, name=plain, stored=stored)
    return matrices


@dataclass(frozen=True, kw_only=True)
class _Matrix(ABC):
    """A quantised matrix, [out, in] but for MXFP4, in the tensors of ``files`` whose names begin with ``name``."""

    files: Checkpoint
    name: str

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its values."""

    @abstractmethod
    def check(self) -> None:
        """Raise RooftopError if its tensors do not fit together."""

    @abstractmethod
    def read(self, region: tuple[slice, ...]) -> Array:
        """The values of ``region``, whose slices have bounds and no steps."""

    def in_groups_of(self, group: int | None) -> bool:
        """True if a scale, and no zero point, covers ``group`` whole inputs (None: all) of one output or more."""
        return False

    @property
    def groups_shape(self) -> tuple[int, ...]:
        """The shape of the matrix, with its groups for its inputs."""
        raise NotImplementedError

    def group_scales(self, region: tuple[slice, ...]) -> Array:
        """The scales of a region of ``groups_shape``."""
        raise NotImplementedError

    def expect(self, suffix: str, codes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Raise RooftopError unless the tensor has one of these dtypes and shapes."""
        name = f"{self.name}{suffix}"
        shape = self.files.shape(name)
        path, code, _ = self.files.tensors[name]
        if code not in codes:
            raise RooftopError(f"{path}: dtype of {name}", code, " or ".join(codes))
        if shape not in shapes:
            raise RooftopError(f"{path}: shape of {name}", shape, " or ".join(map(str, shapes)))

    def expect_dims(self, suffix: str, dims: str) -> None:
        """Raise RooftopError unless the tensor has as many dims as ``dims`` names."""
        shape = self.files.shape(f"{self.name}{suffix}")
        if len(shape) != len(dims.split()):
            raise RooftopError(f"shape of {self.name}{suffix}", shape, f"[{', '.join(dims.split())}]")

    def tensor(self, suffix: str, *region: slice) -> Array:
        """A part of one of its tensors; dims without a slice are whole."""
        name = f"{self.name}{suffix}"
        rest = (slice(None),) * (len(self.files.shape(name)) - len(region))
        return self.files.read(name, (*region, *rest))


@dataclass(frozen=True, kw_only=True)
class _Fp8(_Matrix):
    """An e4m3 matrix. A scale covers ``block`` of (outputs, inputs), 0 for all, and multiplies."""

    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.files.shape(self.name)

    @property
    def dtype(self) -> np.dtype[Any]:
        return _BF16

    def in_groups_of(self, group: int | None) -> bool:
        return self.block[1] == (group or 0) and not self.shape[1] % (group or 1)

    @property
    def groups_shape(self) -> tuple[int, ...]:
        outputs, inputs = self.shape
        return outputs, inputs // (self.block[1] or inputs)

    def group_scales(self, region: tuple[slice, ...]) -> Array:
        rows, columns = self.block[0] or self.shape[0], self.groups_shape[1]
        scales = _floats(self.tensor(self.suffix)).reshape(-1, columns)
        outputs: Array = scales[np.arange(*region[0].indices(self.shape[0])) // rows]
        return outputs[:, region[1]]

    @property
    def suffix(self) -> str:
        """The suffix of its scales."""
        return next((suffix for suffix in _FP8_SCALES if f"{self.name}{suffix}" in self.files), _FP8_SCALES[0])

    def check(self) -> None:
        self.expect_dims("", "out in")
        (outputs, inputs), (rows, columns) = self.shape, self.block
        grid = (ceil_div(outputs, rows) if rows else 1, ceil_div(inputs, columns) if columns else 1)
        # Scales of one column are stored as vectors too, and those of a whole matrix as scalars.
        shapes = [grid[: len(grid) - ones] for ones in range(3) if set(grid[len(grid) - ones :]) <= {1}]
        self.expect(self.suffix, ("F32", "BF16", "F16", "F8_E8M0", "U8"), *shapes)

    def scales(self, region: tuple[slice, ...]) -> NDArray[np.float32]:
        """The scales of ``region``; a dim along which all are the same has size 1."""
        blocks, within = list[slice](), list[slice]()
        for span, size in zip(region, self.block, strict=True):
            first = span.start // size if size else 0
            blocks.append(slice(first, ceil_div(span.stop, size) if size else 1))
            within.append(slice(span.start - first * size, span.stop - first * size) if size else slice(None))
        known = len(self.files.shape(f"{self.name}{self.suffix}"))
        scales = _floats(self.tensor(self.suffix, *blocks[:known]))
        scales = scales.reshape(*(span.stop - span.start for span in blocks))
        for dim, size in enumerate(self.block):
            scales = np.repeat(scales, size, axis=dim) if size > 1 else scales
        return scales[tuple(within)]

    def read(self, region: tuple[slice, ...]) -> Array:
        part: Array = (_E4M3[self.tensor("", *region)] * self.scales(region)).astype(_BF16)
        return part


@dataclass(frozen=True, kw_only=True)
class _Mxfp4(_Matrix):
    """The matrices of all experts, [expert, in, out], stored as [expert, out, block, 16] pairs of e2m1 values.

    The lower half of a byte goes first. A block of 32 inputs has one exponent of two.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, blocks, _ = self.files.shape(f"{self.name}_blocks")
        return experts, blocks * 32, outputs

    @property
    def dtype(self) -> np.dtype[Any]:
        return _BF16

    def check(self) -> None:
        self.expect_dims("_blocks", "expert out block 16")
        blocks = self.files.shape(f"{self.name}_blocks")
        self.expect("_blocks", ("U8",), (*blocks[:3], 16))
        self.expect("_scales", ("U8",), blocks[:3])

    def in_groups_of(self, group: int | None) -> bool:
        return group == MXFP4_GROUP

    @property
    def groups_shape(self) -> tuple[int, ...]:
        experts, outputs, blocks = self.files.shape(f"{self.name}_scales")
        return experts, blocks, outputs

    def group_scales(self, region: tuple[slice, ...]) -> Array:
        experts, blocks, outputs = region
        return _floats(self.tensor("_scales", experts)).swapaxes(1, 2)[:, blocks, outputs]

    def read(self, region: tuple[slice, ...]) -> Array:
        experts, inputs, outputs = region
        first = inputs.start // 32
        blocks = slice(first, ceil_div(inputs.stop, 32))
        pairs = self.tensor("_blocks", experts, outputs, blocks)
        values = np.stack([_E2M1[pairs & 15], _E2M1[pairs >> 4]], axis=-1).reshape(*pairs.shape[:3], 32)
        exponents = self.tensor("_scales", experts, outputs, blocks).astype(np.int32) - _EXPONENT_BIAS
        values = np.ldexp(values, exponents[..., None]).reshape(*pairs.shape[:2], -1)
        part: Array = values[..., inputs.start - first * 32 : inputs.stop - first * 32].swapaxes(1, 2).astype(_BF16)
        return part


@dataclass(frozen=True, kw_only=True)
class _Words(_Matrix):
    """A matrix of whole numbers packed into int32; a value is (number - zero) x scale, in the dtype of the scale."""

    stored: StoredFormat

    @property
    def per_word(self) -> int:
        """Numbers in a word."""
        return 32 // self.stored.bits

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.files.dtype(f"{self.name}.scales")

    def check_scales(self, codes: tuple[str, ...] = ("F16", "BF16", "F32")) -> None:
        """Raise RooftopError if scales and zero points do not fit the matrix."""
        outputs = self.shape[0]
        if outputs % self.per_word:
            accepted = f"outputs that {self.per_word} divides: so many are in a word"
            raise RooftopError(f"shape of {self.name}.qweight", outputs, accepted)
        self.expect(".scales", codes, (self.groups, outputs))
        self.expect(".qzeros", ("I32",), (self.groups, outputs // self.per_word))

    def unpacked(self, words: Array) -> NDArray[np.int32]:
        """[..., word] -> [..., word, number], lowest bits first."""
        shifts = np.arange(self.per_word, dtype=np.uint32) * np.uint32(self.stored.bits)
        numbers = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**self.stored.bits - 1)
        return numbers.astype(np.int32)

    def words_of(self, numbers: slice) -> tuple[slice, slice]:
        """The words of a row that hold these numbers, and the place of the numbers in them."""
        first = numbers.start // self.per_word
        words = slice(first, ceil_div(numbers.stop, self.per_word))
        return words, slice(numbers.start - first * self.per_word, numbers.stop - first * self.per_word)

    @property
    def groups(self) -> int:
        """Groups of inputs that have a scale in common."""
        size = self.stored.block[1]
        return ceil_div(self.shape[1], size) if size else 1

    def groups_of(self, inputs: slice) -> NDArray[np.int64]:
        """The group of each of these inputs, where those of a group are neighbours."""
        return np.arange(inputs.start, inputs.stop) // (self.stored.block[1] or self.shape[1])


@dataclass(frozen=True, kw_only=True)
class _Gptq(_Words):
    """GPTQ: a word has numbers of consecutive inputs of one output; ``g_idx`` has the group of each input."""

    @property
    def shape(self) -> tuple[int, ...]:
        rows, outputs = self.files.shape(f"{self.name}.qweight")
        return outputs, rows * self.per_word

    def check(self) -> None:
        self.expect_dims(".qweight", "row column")
        self.expect(".qweight", ("I32",), self.files.shape(f"{self.name}.qweight"))
        self.check_scales()
        self.expect(".g_idx", ("I32",), self.shape[1:])

    def read(self, region: tuple[slice, ...]) -> Array:
        outputs, inputs = region
        words, within = self.words_of(inputs)
        numbers = self.unpacked(self.tensor(".qweight", words, outputs).T).reshape(outputs.stop - outputs.start, -1)
        words, place = self.words_of(outputs)
        packed = self.tensor(".qzeros", slice(None), words).view(np.uint32)
        if self.stored.zeros_less_one:
            # Whole words, as gptqmodel does it: a borrow of one number from the next is returned.
            packed = packed + np.uint32(sum(1 << self.stored.bits * place for place in range(self.per_word)))
        zeros = self.unpacked(packed).reshape(len(packed), -1)
        groups, count = self.tensor(".g_idx", inputs), len(zeros)
        if groups.min() < 0 or groups.max() >= count:
            raise RooftopError(f"{self.name}.g_idx", int(groups.max()), f"groups from 0 to {count - 1}")
        zeros, scales = zeros[:, place][groups].T, self.tensor(".scales", slice(None), outputs)[groups].T
        part: Array = (numbers[:, within] - zeros).astype(self.dtype) * scales
        return part


@dataclass(frozen=True, kw_only=True)
class _Awq(_Words):
    """AWQ: a word has numbers of eight outputs of one input, in the order of ``_AWQ_COLUMNS``."""

    @property
    def shape(self) -> tuple[int, ...]:
        inputs, words = self.files.shape(f"{self.name}.qweight")
        return words * self.per_word, inputs

    def check(self) -> None:
        self.expect_dims(".qweight", "row column")
        self.expect(".qweight", ("I32",), self.files.shape(f"{self.name}.qweight"))
        self.check_scales()

    def columns(self, words: Array) -> NDArray[np.int32]:
        """[row, word] -> [row, output]."""
        numbers = self.unpacked(words)
        ordered = np.empty_like(numbers)
        ordered[..., _AWQ_COLUMNS] = numbers
        return ordered.reshape(len(words), -1)

    def read(self, region: tuple[slice, ...]) -> Array:
        outputs, inputs = region
        words, within = self.words_of(outputs)
        groups = self.groups_of(inputs)
        some = slice(int(groups[0]), int(groups[-1]) + 1)
        numbers = self.columns(self.tensor(".qweight", inputs, words))
        zeros = self.columns(self.tensor(".qzeros", some, words))[groups - some.start]
        scales = self.tensor(".scales", some, outputs)[groups - some.start]
        part: Array = ((numbers - zeros)[:, within].astype(self.dtype) * scales).T
        return part


@dataclass(frozen=True, kw_only=True)
class _Packed(_Words):
    """compressed-tensors: a word has numbers of consecutive inputs of one output, and half of their range is zero."""

    @property
    def shape(self) -> tuple[int, ...]:
        outputs, words = self.files.shape(f"{self.name}_packed")
        return outputs, words * self.per_word

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.files.dtype(f"{self.name}_scale")

    def check(self) -> None:
        self.expect_dims("_packed", "out word")
        self.expect("_packed", ("I32",), self.files.shape(f"{self.name}_packed"))
        self.expect("_scale", ("BF16", "F16", "F32"), (self.shape[0], self.groups))

    def in_groups_of(self, group: int | None) -> bool:
        return self.stored.block[1] == (group or 0) and not self.shape[1] % (group or 1)

    @property
    def groups_shape(self) -> tuple[int, ...]:
        return self.shape[0], self.groups

    def group_scales(self, region: tuple[slice, ...]) -> Array:
        return self.tensor("_scale")[region].astype(np.float32)

    def read(self, region: tuple[slice, ...]) -> Array:
        outputs, inputs = region
        words, within = self.words_of(inputs)
        numbers = self.unpacked(self.tensor("_packed", outputs, words)).reshape(outputs.stop - outputs.start, -1)
        values = (numbers[:, within] - 2 ** (self.stored.bits - 1)).astype(self.dtype)
        part: Array = values * self.tensor("_scale", outputs)[:, self.groups_of(inputs)]
        return part


def _floats(scales: Array) -> NDArray[np.float32]:
    """Scales as float32; bytes are exponents of two."""
    if scales.dtype == np.uint8:
        return np.ldexp(np.float32(1), scales.astype(np.int32) - _EXPONENT_BIAS)
    return scales.astype(np.float32)
