"""A mode of the current thread in which JAX computes as usual, on the CPU, within a target."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import config, mesh, sharding_impls

_thread = threading.local()


def is_computing() -> bool:
    """True inside ``computing``."""
    return getattr(_thread, "computing", False)


@contextmanager
def computing() -> Iterator[None]:
    """Compute on the CPU, outside of the program's meshes."""
    before, context = is_computing(), _device_context()
    _thread.computing = True
    set_before = context.swap_local(mesh.empty_concrete_mesh)
    try:
        with jax.default_device(jax.devices("cpu")[0]), mesh.use_abstract_mesh(mesh.empty_abstract_mesh):
            yield
    finally:
        context.set_local(set_before)
        _thread.computing = before


def _device_context() -> Any:
    """JAX's mesh of the current thread; its module changed after 0.10."""
    return getattr(config, "device_context", None) or getattr(sharding_impls, "device_context")  # noqa: B009
