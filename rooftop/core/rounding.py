"""Whole parts of sizes that do not divide: numbers, or arrays that broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from rooftop.core.ledger import Number

    Sizes = TypeVar("Sizes", int, Number)


def ceil_div(size: Sizes, parts: Sizes) -> Sizes:
    """``size / parts`` rounded up: the size of the largest of so many parts."""
    return -(-size // parts)


@overload
def next_multiple(size: int, unit: int) -> int: ...
@overload
def next_multiple(size: Any, unit: Any) -> Any: ...
def next_multiple(size: Any, unit: Any) -> Any:
    """The least multiple of ``unit`` that is not below ``size``."""
    return ceil_div(size, unit) * unit
