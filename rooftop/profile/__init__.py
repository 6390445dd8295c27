"""Measurements on the local devices, from traces or taken directly. Raises RooftopError on import without JAX."""

from importlib.util import find_spec

from rooftop.core.errors import RooftopError

if find_spec("jax") is None:
    raise RooftopError("jax", "not installed", "a Python that has it, for what runs here: pip install 'rooftop[jax]'")
