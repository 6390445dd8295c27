"""Environments with other releases of jax and libtpu, in the user's cache. This module needs no JAX.

An environment has its own jax, jaxlib or libtpu, and sees all other packages of the Python that runs rooftop.
"""

from __future__ import annotations

import email
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rooftop.compiler.compiling import Progress
from rooftop.core.errors import RooftopError
from rooftop.core.files import cache_folder, write_text

#: Packages that may have another release.
_NAMES = ("jax", "jaxlib", "libtpu")
_ACCEPTED = "releases of jax, jaxlib and libtpu, such as jax==0.10.2,libtpu==0.0.42.1"
_READY = "ready"


@dataclass(frozen=True, kw_only=True)
class Releases:
    """Releases of jax, jaxlib and libtpu, by package, such as {'jax': '0.10.2'}; those that are left out stay."""

    versions: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Releases:
        """The releases in 'jax==X,libtpu==Y'. Raises RooftopError for other packages and for ranges.

        A release of jax brings its own jaxlib.
        """
        versions: dict[str, str] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\w+)\s*==\s*([\w.+!-]+)\s*", part)
            if match is None or match.group(1) not in _NAMES or match.group(1) in versions:
                raise RooftopError("with", text, _ACCEPTED)
            versions[match.group(1)] = match.group(2)
        if "jax" in versions:
            versions.setdefault("jaxlib", versions["jax"])
        return cls(versions=versions)

    @property
    def pins(self) -> list[str]:
        """The requirements, as pip reads them."""
        return [f"{name}=={self.versions[name]}" for name in _NAMES if name in self.versions]

    def __str__(self) -> str:
        return ",".join(self.pins)


def python_with(releases: Releases, on_progress: Progress | None = None) -> Path:
    """The Python of an environment with these releases, which is installed when it is first asked for.

    ``on_progress`` is called a few times a second. Raises RooftopError for releases that cannot be installed.
    """
    key = [str(releases), sys.version, sys.prefix]
    folder = cache_folder("environments") / hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
    python = folder / "bin" / "python"
    if (folder / _READY).exists() and python.exists():
        return python
    progress = on_progress or (lambda phase, elapsed_s: None)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _call([sys.executable, "-m", "venv", "--without-pip", str(folder)], "making an environment", progress)
        _install(python, releases.pins, progress)
        packages = next(folder.glob("lib/python*/site-packages"))
        if "jax" in releases.versions and "libtpu" not in releases.versions:
            _install(python, [_libtpu_of(packages)], progress)
    except RooftopError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    # Packages of the environment come first; their paths are read as this Python reads them, .pth files included.
    shared = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in shared)
    write_text(packages / "rooftop-shared.pth", lines)
    write_text(folder / _READY, f"{releases}\n")
    return python


def run_rooftop(python: Path, words: Sequence[str]) -> int:
    """Run ``rooftop WORDS`` with another Python; its exit status."""
    # rooftop itself may be on the path of this process only.
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(dict.fromkeys([root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])).rstrip(
        os.pathsep
    )
    sys.stdout.flush()
    return subprocess.run([str(python), "-m", "rooftop", *words], env={**os.environ, "PYTHONPATH": path}).returncode


def _install(python: Path, pins: Sequence[str], progress: Progress) -> None:
    """Install releases without their dependencies, which are shared."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install"]
    elif uv is not None:
        command = [uv, "pip", "install", "--python", str(python)]
    else:
        raise RooftopError("with", ",".join(pins), "a Python that has pip, or uv on the path, to install it")
    _call([*command, "--quiet", "--no-deps", *pins], f"installing {', '.join(pins)}", progress)


def _call(command: Sequence[str], phase: str, progress: Progress) -> None:
    """Run a command to its end. Raises RooftopError with its last line if it fails."""
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        while True:
            progress(phase, time.monotonic() - start)
            try:
                output, _ = process.communicate(timeout=0.25)
                break
            except subprocess.TimeoutExpired:
                continue
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        lines = [line for line in output.strip().splitlines() if "ERROR" in line or "error" in line] or [
            f"{phase} failed"
        ]
        raise RooftopError(
            "with", phase.removeprefix("installing "), f"releases that can be installed ({lines[-1].strip()})"
        )


def _libtpu_of(packages: Path) -> str:
    """The requirement of libtpu that the installed jax states for TPUs."""
    metadata = next(packages.glob("jax-*.dist-info/METADATA")).read_text(encoding="utf-8")
    for requirement in email.message_from_string(metadata).get_all("Requires-Dist") or []:
        match = re.match(r"libtpu\s*([=<>~!][^;]*);.*extra == ['\"]tpu['\"]", requirement)
        if match:
            return f"libtpu{match.group(1).strip()}"
    raise RooftopError("with", packages.parents[2].name, "a release of jax that says which libtpu it needs; name both")
