"""XLA's options for a train step. Plans assume them, so that every step is compiled with them."""

from __future__ import annotations

from collections.abc import Mapping

from rooftop.arrays.rules import GATHER_AXES, ways
from rooftop.roofline.overlap import overlap

#: Only all three together keep the AllGathers.
_KEEP_ALL_GATHERS: Mapping[str, bool | str] = {
    "xla_tpu_prefer_async_allgather_to_allreduce": True,
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
}
#: A size in MiB that no array has.
_NO_WINDOWED_EINSUM: Mapping[str, bool | str] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


def compiler_options(mesh: Mapping[str, int], chip: str, *, slices: int) -> dict[str, bool | str]:
    """Options of XLA:TPU for a step on axes of these sizes, over ``slices`` of the chip.

    On some chips XLA turns the AllGather of a weight over a whole slice into a synchronous AllReduce of mostly zeros,
    which sends twice the bytes and needs the whole weight once more in memory. On others it cuts the gathers of weights
    and their matmuls into rings of pieces, whose sums are read and written in HBM for each piece. These options prevent
    both.
    """
    schedule, gathered = overlap(chip), ways(mesh, *GATHER_AXES)
    whole = ways(mesh, *mesh)
    if gathered in (whole, whole // slices) and schedule.whole_slice_gather == "all_reduce":
        return dict(_KEEP_ALL_GATHERS)
    return dict(_NO_WINDOWED_EINSUM) if gathered > 1 and not schedule.windowed_einsum else {}
