"""Measurements on the devices here, read from traces or taken directly. Importing it without JAX raises RooftopError."""

from importlib.util import find_spec

from rooftop.core.errors import RooftopError

if find_spec("jax") is None:
    raise RooftopError("jax", "not installed", "a Python that has it, for what runs here: pip install 'rooftop[jax]'")
