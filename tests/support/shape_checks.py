"""The type checker of the programs in tests: beartype, with whole numbers accepted as floats.

Constructors are not checked: JAX builds the same trees of arrays, of shapes and of shardings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    return function if function.__name__ == "__init__" else _check(function)
