"""Packages that only some installs have: the extra of rooftop that installs each, and the line that says so.

Modules import such packages like any other. Where a verb begins (the command line, a function of ``rooftop``),
``naming_extras`` turns the import that failed into one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rooftop.core.errors import RooftopError

#: Extra -> the packages of it that its verbs need, by their names in imports. The smallest extras come first.
EXTRAS = {
    "ui": ("starlette", "uvicorn"),
    "tensorboard": ("tensorboardX",),
    "parquet": ("pyarrow",),
    "jax": ("jax", "jaxlib", "ml_dtypes", "scipy"),
    "serve": (
        "jax", "jaxlib", "ml_dtypes", "scipy", "safetensors", "tokenizers", "starlette", "uvicorn", "httptools",
        "prometheus_client", "jinja2", "llguidance", "httpx", "cryptography",
    ),
    "train": ("jax", "jaxlib", "ml_dtypes", "optax", "scipy", "orbax", "safetensors", "tokenizers"),
    "embed": ("jax", "jaxlib", "ml_dtypes", "optax", "scipy", "orbax", "numba", "pyarrow"),
    "compile": ("jax", "jaxlib", "ml_dtypes", "optax", "scipy", "libtpu"),
    "gpu-compile": ("jax", "jaxlib", "ml_dtypes", "optax", "scipy", "jax_cuda12_plugin", "nvidia.cudnn"),
}  # fmt: skip

#: Packages that a verb needs for some of its inputs only, or is faster with: it asks for them by name.
SOMETIMES = ("httpx", "numba", "pyarrow")


def is_installed(package: str) -> bool:
    """True if ``package`` can be imported; nothing is imported but the packages that it lies in."""
    try:
        return find_spec(package) is not None
    except (ModuleNotFoundError, ValueError):
        # The package that it lies in is missing, or the module is hidden: sys.modules has None.
        return False


def not_installed(package: str, extra: str, purpose: str = "") -> RooftopError:
    """The error for a missing ``package``: the command that installs ``extra``."""
    use = f", {purpose}" if purpose else ""
    return RooftopError(package, "not installed", f"a Python that has it{use}: pip install 'rooftop[{extra}]'")


def require(extra: str, *packages: str, purpose: str = "") -> None:
    """Raise RooftopError if one of ``packages`` is not installed; by default, those that each verb of it needs."""
    for package in packages or [name for name in EXTRAS[extra] if name not in SOMETIMES]:
        if not is_installed(package):
            raise not_installed(package, extra, purpose)


@contextmanager
def naming_extras() -> Iterator[None]:
    """Turn a failed import of an optional package into the RooftopError of the smallest extra that has it.

    Other failed imports are raised as they are: those of rooftop's own modules, of a user's, and of a part that an
    installed package lacks.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((name for name, packages in EXTRAS.items() if package in packages), None)
        if extra is None or is_installed(package):
            raise
        raise not_installed(package, extra) from None
