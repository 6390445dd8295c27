"""Models by their names on the Hugging Face hub."""

from __future__ import annotations

from rooftop.models.hub.files import cached_config, config_address, fetch_config
from rooftop.models.hub.names import Repository, architecture, dtype_word, joined, split_words

__all__ = [
    "Repository",
    "architecture",
    "cached_config",
    "config_address",
    "dtype_word",
    "fetch_config",
    "joined",
    "split_words",
]
