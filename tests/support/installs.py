"""Installs of rooftop with some extras only, in one environment: what an extra does not install is hidden.

Run as a program, this file tries every example of help in every install, each in a fork, and prints what came of it.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: Every extra but the one whose packages no other environment of the tests has; '' is an install without any.
INSTALLS = ("", *(name for name in PROJECT["optional-dependencies"] if name not in ("gpu-compile", "all")))


def requirements(extra: str) -> list[Requirement]:
    """Requirements of pyproject.toml with ``extra``."""
    texts = [*PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] if extra else ())]
    return [Requirement(text) for text in texts]


@cache
def distributions(extra: str) -> frozenset[str]:
    """Names of the distributions that an install with ``extra`` has, by the metadata of those that are installed."""
    names: set[tuple[str, str]] = set()
    waiting = requirements(extra)
    while waiting:
        requirement = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        for extra in ("", *requirement.extras):
            entry = canonicalize_name(requirement.name), extra
            if entry in names:
                continue
            names.add(entry)
            with suppress(importlib.metadata.PackageNotFoundError):
                for text in importlib.metadata.requires(requirement.name) or ():
                    inner = Requirement(text)
                    if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                        inner.marker = None
                        waiting.append(inner)
    return frozenset(name for name, _ in names)


@cache
def _owners() -> dict[str, set[str]]:
    """Distributions of each installed top-level module."""
    modules = importlib.metadata.packages_distributions()
    return {module: {canonicalize_name(owner) for owner in owners} for module, owners in modules.items()}


@cache
def hidden(extra: str) -> frozenset[str]:
    """Names of installed top-level modules that an install with ``extra`` does not have."""
    own = distributions(extra) | {"rooftop"}
    return frozenset(module for module, owners in _owners().items() if not own & owners)


class Hider(MetaPathFinder):
    """A finder in the place of all others that does not find ``modules``; metadata of packages stay."""

    def __init__(self) -> None:
        self.modules: frozenset[str] = frozenset()
        self._others = tuple(sys.meta_path)
        sys.meta_path[:] = [self]

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Ask the others, unless the module is hidden."""
        if name.partition(".")[0] in self.modules:
            return None
        specs = (other.find_spec(name, path, target) for other in self._others)
        return next((spec for spec in specs if spec is not None), None)

    def find_distributions(self, *arguments: Any) -> Iterator[importlib.metadata.Distribution]:
        """Ask the others."""
        for other in self._others:
            if isinstance(other, type) and hasattr(other, "find_distributions"):
                yield from other.find_distributions(*arguments)


def run(words: Sequence[str], output: Path) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of ``rooftop WORDS`` in a fork of this process."""
    streams = [output / "out", output / "err"]
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            for number, stream in enumerate(streams, start=1):
                os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            from rooftop.cli.main import main

            main(words)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, result = os.waitpid(pid, 0)
    out, err = (stream.read_text(errors="replace") for stream in streams)
    return os.waitstatus_to_exitcode(result), out, err


#: The end of a line that names an extra: 'pip install ...'.
NAMED = re.compile(r"^rooftop: (\S+): got 'not installed'; accepted: .*pip install 'rooftop\[([a-z-]+)\]'\n?$")


def main(hurried: bool) -> None:
    """Print a JSON object: install -> verb -> example -> status, stdout's first line, stderr.

    An example that ran in the install without extras is not run in the others. Neither is one whose extra the install
    has, which may train or compile for minutes: ``tests.release`` runs those. A ``hurried`` table leaves out those that
    compute for seconds, and has one example of each verb and extra that it names in the other installs.
    """
    installs = {install: hidden(install) for install in INSTALLS}
    hider = Hider()
    hider.modules = installs[""]
    import rooftop
    from rooftop.core.extras import EXTRAS, SOMETIMES
    from tests.support.help_examples import examples, place, prepare, quick, words_of

    table: dict[str, dict[str, dict[str, tuple[int, str, str]]]] = {install: {} for install in installs}
    with tempfile.TemporaryDirectory(prefix="rooftop-tests-") as name:
        folder, output = Path(name) / "work", Path(name)
        folder.mkdir()
        prepare(folder, clicks=64)
        os.chdir(folder)
        # Forks have what is imported by now.
        for public in rooftop.__all__:
            getattr(rooftop, public)
        gc.freeze()
        for verb, lines in examples().items():
            place(folder, verb)
            seen: set[str] = set()
            for line in quick(lines) if hurried else lines:
                needed: set[str] = set()
                for install, hider.modules in installs.items():
                    if install and not needed & hider.modules:
                        continue
                    status, out, err = run(words_of(line), output)
                    table[install].setdefault(verb, {})[line] = status, out.partition("\n")[0], err
                    named = NAMED.match(err)
                    if named and not install and not (hurried and named[2] in seen):
                        seen.add(named[2])
                        needed = {named[1], *(package for package in EXTRAS[named[2]] if package not in SOMETIMES)}
    json.dump(table, sys.stdout)


if __name__ == "__main__":
    main(hurried=sys.argv[1:] == ["quick"])
