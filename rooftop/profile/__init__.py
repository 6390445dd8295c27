"""What runs take on the devices that are here. Needs JAX: ``rooftop.errors.RooftopError`` on import where it is not."""

from importlib.util import find_spec

from rooftop.errors import RooftopError

if find_spec("jax") is None:
    raise RooftopError("jax", "not installed", "a Python that has it, for what runs here: pip install 'rooftop[jax]'")
