"""The user's own lines: frames outside of installed packages, of Python, and of this package."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

_FOLDERS = tuple(
    str(Path(folder)) + "/"
    for folder in {str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))}
)


def is_own(path: str) -> bool:
    """True for the path of a user's source file."""
    installed = "/site-packages/" in path or "/dist-packages/" in path
    # The code of ``python -c`` is the user's.
    return path == "<string>" or not (installed or path.startswith("<") or path.startswith(_FOLDERS))


@cache
def _jax() -> tuple[str, ...]:
    """The folder of JAX; none where it is not installed. It is found without an import."""
    spec = find_spec("jax")
    return () if spec is None or spec.origin is None else (f"{Path(spec.origin).parent}/",)


def is_of_jax(path: str) -> bool:
    """True for the path of a source file of JAX."""
    return path.startswith(_jax())


def place(path: str, line: int) -> str:
    """'file:line', without folders."""
    return f"{Path(path).name}:{line}"


def calling_place() -> str:
    """The innermost of the user's own lines that are running; '' if there is none."""
    return _innermost(traceback.walk_stack(sys._getframe(1)))


def raising_place(error: BaseException) -> str:
    """The innermost of the user's own lines in a traceback; '' if there is none."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    return _innermost(reversed(frames))


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str:
    for frame, line in frames:
        if is_own(frame.f_code.co_filename):
            return place(frame.f_code.co_filename, line)
    return ""
