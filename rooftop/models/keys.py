"""Typed reading of the keys of a JSON object from a file, with errors that name the file and the key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rooftop.errors import RooftopError, unknown
from rooftop.models.config import LARGEST_SIZE

#: The default of a key that has none.
REQUIRED: Any = object()


class Keys:
    """One JSON object of the file ``where``; ``prefix`` is the path to it inside the file ('text_config.').

    A key that is absent takes its default, and so does ``null``, unless the caller says what ``null`` means. Every
    method raises RooftopError on a value of another type or out of range, and on a required key that is absent.
    """

    def __init__(self, data: Any, where: str, prefix: str = "") -> None:
        self.where, self.prefix = where, prefix
        if not isinstance(data, Mapping):
            raise RooftopError(self.field(""), data, "a JSON object")
        self.data = data

    def field(self, key: str) -> str:
        """How an error names ``key``."""
        return f"{self.where}: {self.prefix}{key}".rstrip(": .")

    def whole(
        self, key: str, default: Any = REQUIRED, *, null: Any = REQUIRED, least: int = 1, most: int = LARGEST_SIZE
    ) -> Any:
        """A whole number from ``least`` to ``most``."""
        accepted = f"a whole number from {least} to {most:,}"
        value = self._get(key, default, null, int, accepted)
        if key in self.data and value is not None and not least <= value <= most:
            raise RooftopError(self.field(key), value, accepted)
        return value

    def number(self, key: str, default: Any = REQUIRED, *, null: Any = REQUIRED) -> Any:
        """A finite number that is not negative."""
        value = self._get(key, default, null, (int, float), "a number")
        if value is not None and not 0 <= value < math.inf:
            raise RooftopError(self.field(key), value, "a number that is not negative")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return bool(self._get(key, default, REQUIRED, bool, "true or false"))

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        """A text."""
        return self._get(key, default, REQUIRED, str, "a text")

    def name(self, key: str, known: Mapping[str, Any], default: Any = REQUIRED) -> Any:
        """What ``known`` has for the text under ``key``."""
        text = self.text(key, default)
        if text not in known:
            raise unknown(self.field(key), text, known)
        return known[text]

    def array(self, key: str, default: Any = REQUIRED) -> Any:
        """A list."""
        return self._get(key, default, REQUIRED, list, "a list")

    def inner(self, key: str) -> Keys:
        """The JSON object under ``key``."""
        data = self._get(key, REQUIRED, REQUIRED, Mapping, "a JSON object")
        return Keys(data, self.where, f"{self.prefix}{key}.")

    def has(self, key: str) -> bool:
        """Whether ``key`` is there and says something: neither null nor empty."""
        return bool(self.data.get(key))

    def only(self, key: str, *accepted: Any) -> None:
        """Refuse a value other than ``accepted`` or null: it asks for something that nothing here can express."""
        value = self.data.get(key)
        if value is not None and value not in accepted:
            raise RooftopError(self.field(key), value, " or ".join(json.dumps(choice) for choice in accepted))

    def _get(self, key: str, default: Any, null: Any, kind: Any, accepted: str) -> Any:
        value = self.data.get(key)
        if value is None:
            meant = null if key in self.data and null is not REQUIRED else default
            if meant is REQUIRED:
                raise RooftopError(self.field(key), None, f"{accepted}; the key is required")
            return meant
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise RooftopError(self.field(key), value, accepted)
        return value
