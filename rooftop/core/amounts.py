"""Types of the figures in records: amounts are never negative, and JSON Schemas say so."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

#: Seconds, bytes, FLOPs and rates.
Amount = Annotated[float, Meta(ge=0)]
#: Numbers of things, from zero and from one.
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
#: A part of a whole.
Share = Annotated[float, Meta(ge=0, le=1)]
