"""Write the requirement files of guests again: ``python tests/guests/lock.py``, with uv on the path or next to Python.

A guest's environment sees the packages of requirements/dev.txt, so that JAX is the one that rooftop is tested with; its
own file has only what it needs beyond them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements")
SHARED = ROOT / "requirements" / "dev.txt"
#: Names of environments, and the packages that each is for.
GUESTS = {
    "equinox": ("equinox==0.13.8",),
    "flax": ("flax==0.12.8",),
    "haiku": ("dm-haiku==0.0.17",),
    "keras": ("keras==3.15.1",),
    "sparsecore": ("jax-tpu-embedding==0.1.0",),
}


def main() -> None:
    uv = Path(sys.executable).with_name("uv")
    for name, packages in GUESTS.items():
        command = [
            str(uv) if uv.exists() else "uv", "pip", "compile", "--quiet", "--python-version", "3.11",
            "--universal", "--generate-hashes", "--no-header", "--no-emit-index-url", "--no-emit-find-links",
            "--annotation-style", "line", "--constraints", str(SHARED), "-",
        ]  # fmt: skip
        done = subprocess.run(command, input="\n".join(packages), text=True, capture_output=True, check=True)
        shared = set(pins(SHARED.read_text(encoding="utf-8")))
        own = [text for pin, text in pins(done.stdout).items() if pin not in shared]
        REQUIREMENTS.mkdir(exist_ok=True)
        (REQUIREMENTS / f"{name}.txt").write_text("".join(own), encoding="utf-8")
        print(f"{name}: {len(own)} packages")


def pins(text: str) -> dict[str, str]:
    """The entries of a requirement file, by package and version."""
    entries = re.split(r"^(?=[a-zA-Z])", text, flags=re.MULTILINE)
    return {re.split(r"[ ;\\]", entry, maxsplit=1)[0]: entry for entry in entries if "==" in entry}


if __name__ == "__main__":
    main()
