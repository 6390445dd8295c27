"""The files that ``rooftop plan`` writes, as every verb that takes one reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rooftop.errors import RooftopError


def read_plan_file(file: Path, *, field: str = "plan", accepted: str = "a plan.json written by rooftop plan") -> Any:
    """The object in a plan.json, read once: it may be a pipe. Raises RooftopError for what holds none."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RooftopError(field, str(file), f"{accepted} ({error.strerror})") from None
    except ValueError as error:
        raise RooftopError(field, str(file), f"{accepted} (not JSON: {error})") from None
    if not isinstance(data, dict):
        raise RooftopError(field, str(file), f"{accepted} (this is no JSON object)")
    return data
