"""Rules of programs that XLA compiles, and schedules of XLA:TPU by release of libtpu: each release is a file."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from rooftop.frameworks.tables import DATA, data_table

_PACKAGE = "libtpu"


@cache
def _programs() -> Mapping[str, Any]:
    return data_table("xla/programs")


@cache
def xla_rules() -> Sequence[Mapping[str, Any]]:
    """Rules of all programs, and those of every release, which name it as their ``compiler``."""
    schedules = ((release, data_table(f"xla/{_PACKAGE}-{release}")) for release in libtpu_releases())
    return (
        *_programs()["rule"],
        *({**rule, "compiler": release} for release, table in schedules for rule in table["rule"]),
    )


@cache
def libtpu_releases() -> tuple[str, ...]:
    """Releases of libtpu that have a file, the oldest first."""
    files = DATA.glob(f"xla/{_PACKAGE}-*.toml")
    return tuple(sorted((path.stem.removeprefix(f"{_PACKAGE}-") for path in files), key=release_number))


def pinned_release() -> str:
    """The release whose schedules other frameworks' programs have, and ours where libtpu is not installed."""
    return str(_programs()["release"])


@cache
def planned_release() -> str:
    """The release that plans of our program assume by default: that of the installed libtpu, or the pinned one."""
    try:
        return nearest_release(importlib.metadata.version(_PACKAGE))
    except importlib.metadata.PackageNotFoundError:
        return pinned_release()


def nearest_release(release: str) -> str:
    """The newest release with a file that is not newer than ``release``; the oldest if there is none."""
    known = libtpu_releases()
    not_newer = [name for name in known if release_number(name) <= release_number(release)]
    return not_newer[-1] if not_newer else known[0]


def release_number(release: str) -> tuple[int, ...]:
    """The numbers of a release, by which releases are compared: those of '0.0.53.dev20261201' are 0, 0 and 53."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[a-z+]", release)[0])))
