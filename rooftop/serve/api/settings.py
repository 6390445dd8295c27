"""Settings of the API, checked before the server is imported."""

from __future__ import annotations

from dataclasses import dataclass

from rooftop.core.errors import RooftopError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the API.

    ``model`` is the model's name in requests. Without ``keys`` everyone may ask. Web pages of ``origins`` may ask from
    a browser. ``log_texts`` writes prompts and answers to the log.
    """

    model: str
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    body_bytes: int = 32 * 2**20
    log_texts: bool = False

    def __post_init__(self) -> None:
        if self.body_bytes < 1:
            raise RooftopError("max-body", self.body_bytes, "a positive number of bytes")
        if not all(self.keys):
            raise RooftopError("api-key", "", "a key that is not empty")
