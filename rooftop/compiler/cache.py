"""Cached answers of the compiler: one file for each request, in the user's cache directory.

An answer is valid for the same request, compiler versions and environment variables, as long as the program's source
files are unchanged: rooftop's and the user's own. Installed packages count by their versions.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooftop.compiler.targets import XLA_GPU
from rooftop.core.errors import RooftopError
from rooftop.core.files import cache_folder, write_text

#: Packages that determine an answer; packages that are not installed count as absent.
_PACKAGES = ("jax", "jaxlib", "libtpu", XLA_GPU, "nvidia-cudnn-cu12", "optax", "numpy")
_VARIABLES = ("JAX_", "XLA_", "LIBTPU_", "TPU_")
_FORMAT = 2


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal; '' if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Answers in ``folder``, at most ``limit_bytes``: the least recently used are removed."""

    folder: Path
    limit_bytes: int = 2**30

    @classmethod
    def of_user(cls) -> Cache:
        """The cache of the user: ``rooftop/compiled`` in $XDG_CACHE_HOME, or in ~/.cache."""
        return cls(folder=cache_folder("compiled"))

    def find(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """The valid answer to ``request``, or None. A damaged file counts as no answer."""
        path = self._path(request)
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
            sources: dict[str, str] = entry["sources"]
            result: dict[str, Any] = entry["result"]
            if entry["format"] != _FORMAT or any(digest(Path(name)) != known for name, known in sources.items()):
                return None
            os.utime(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return result

    def keep(self, request: Mapping[str, Any], result: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        """Store an answer, with the digests of its source files; do nothing if the folder cannot be written."""
        entry = {"format": _FORMAT, "request": request, "sources": sources, "result": result}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self._path(request), json.dumps(entry))
            self._make_room()
        except (OSError, RooftopError):
            # The caller still has the answer; the next compilation is slow again.
            return

    def _path(self, request: Mapping[str, Any]) -> Path:
        variables = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
        code = [str(Path(__file__).parents[1])]
        if not str(request.get("program")).startswith("rooftop."):
            # Other folders may have other programs of this name.
            code += [os.getcwd(), os.environ.get("PYTHONPATH", "")]
        key = json.dumps([request, _versions(), variables, code], sort_keys=True)
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def _make_room(self) -> None:
        files = sorted(((path.stat(), path) for path in self.folder.iterdir()), key=lambda entry: -entry[0].st_mtime)
        total = 0
        for status, path in files:
            total += status.st_size
            if total > self.limit_bytes:
                path.unlink(missing_ok=True)


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
