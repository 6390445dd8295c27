"""GPUs as XLA:GPU is told of them, so that it compiles for a slice of them with no GPU and no driver.

XLA takes a target as the text of a protocol buffer, and a topology as domains of NVLink x hosts of a domain x GPUs of a
host. A topology with another number of domains has other collectives, so it is that of the slice.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.core.extras import require
from rooftop.hardware import Chip, Slice

#: The modules of JAX's plugins for GPUs, and the packages of their XLA:GPU, by preference. All have the version of jax.
_PLUGINS: Mapping[str, str] = {"jax_cuda12_plugin": "jax-cuda12-pjrt", "jax_cuda13_plugin": "jax-cuda13-pjrt"}
#: The plugin that is installed, the first if none is, and its XLA:GPU.
PLUGIN = next((name for name in _PLUGINS if find_spec(name) is not None), next(iter(_PLUGINS)))
XLA_GPU = _PLUGINS[PLUGIN]
#: Limits of all NVIDIA GPUs since 2017.
_LIMITS: Mapping[str, int] = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49_152,
    "registers_per_core_limit": 65_536,
    "registers_per_block_limit": 65_536,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65_535,
    "block_dim_limit_z": 65_535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
}
#: The version of cuDNN whose attention XLA may call.
_CUDNN = (9, 10)


def require_cudnn() -> None:
    """Raise RooftopError if cuDNN is not installed, whose attention kernels XLA compiles into a program."""
    require("gpu-compile", "nvidia.cudnn", purpose="on Linux, for attention on GPUs")


def target_text(chip: Chip) -> str:
    """The target of XLA:GPU for ``chip``: a GpuTargetConfigProto as text.

    Raises RooftopError for a chip that is not in targets.toml.
    """
    table = _table()
    if chip.name not in table["chips"]:
        raise RooftopError("chip", chip.name, f"a GPU that XLA compiles for: {', '.join(table['chips'])}")
    entry = table["chips"][chip.name]
    major, minor = entry["capability"]
    architecture: Mapping[str, int] = table["architectures"][f"{major}-{minor}"]
    figures: dict[str, float] = {
        **_LIMITS,
        **architecture,
        "core_count": chip.cores,
        "clock_rate_ghz": chip.clock_hz / 1e9,
        "memory_bandwidth": int(chip.hbm_bytes_per_s),
        "device_memory_size": int(chip.hbm_usable_bytes),
        "l2_cache_size": entry["l2_bytes"],
    }
    device = [f"{name}: {figure}" for name, figure in figures.items()]
    device += [f"cuda_compute_capability {{ major: {major} minor: {minor} }}", f'name: "{entry["name"]}"']
    return "\n".join(
        [
            f"gpu_device_info {{ {' '.join(device)} }}",
            'platform_name: "CUDA"',
            f"dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} }}",
            f'device_description_str: "{entry["name"]}"',
        ]
    )


def topology_text(slice_: Slice) -> str:
    """The topology of XLA:GPU for a slice: domains x hosts of a domain x GPUs of a host.

    Raises RooftopError for part of a domain that is not whole hosts.
    """
    used, domains = slice_.shape
    host = min(used, math.prod(slice_.chip.host_shape))
    if used % host:
        raise RooftopError("slice", slice_.name, f"whole hosts of {host} GPUs in a domain, to be compiled for")
    return f"{domains}x{used // host}x{host}"


def gpus_by_coordinates(devices: Sequence[Any]) -> dict[tuple[int, ...], Any]:
    """Described GPUs by their number in the domain, and the domain if there are several."""
    per_host = 1 + max(device.coords[2] for device in devices)
    several = any(device.coords[0] for device in devices)
    numbered = {}
    for device in devices:
        domain, host, number = device.coords
        numbered[(host * per_host + number, *((domain,) if several else ()))] = device
    return numbered


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("targets.toml").read_text(encoding="utf-8"))
