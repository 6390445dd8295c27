"""Compiler options that a training step is given, where XLA:TPU's defaults are known to be worse."""

from __future__ import annotations

from rooftop.arrays import Mesh
from rooftop.roofline.overlap import overlap

#: All three together: with any of them missing the AllGathers stay AllReduces.
_KEEP_ALL_GATHERS: dict[str, bool | int | str] = {
    "xla_tpu_prefer_async_allgather_to_allreduce": True,
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
}


def training_options(mesh: Mesh) -> dict[str, bool | int | str]:
    """Options for a step on ``mesh``.

    Of a weight's AllGather over every device of a slice, XLA makes a synchronous AllReduce of arrays that are mostly
    zeros on some chips: twice the bytes sent, and the whole weight once more in memory. Not with these options.
    """
    slice_ = mesh.slice
    whole = mesh.size("fsdp") * slice_.num_slices == slice_.devices
    return dict(_KEEP_ALL_GATHERS) if whole and overlap(slice_.chip.name).whole_slice_gather == "all_reduce" else {}
