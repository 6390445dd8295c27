"""Record the run that ``rooftop explain --demo`` explains, and write it to ``rooftop/explain/demo.tar.xz``.

``python docs/recording.py`` trains ten steps of a small plan on eight emulated devices, with a profile of two. It takes
a minute; the checkpoints, the tokenizer and the trace for another viewer are left out.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ARCHIVE = Path(__file__).resolve().parent.parent / "rooftop" / "explain" / "demo.tar.xz"
_PLAN = "plan train llama:2M --on v5e:2x4 --mesh fsdp=4,tensor=2 --batch-seqs 16 --seq 256 --remat block -o plan.json"
_RUN = (
    "train plan.json --as-is --devices 8 --steps 10 --profile steps=6..8 --save-every 10 --run demo --hold-out 0 "
    "--data text.txt"
)
#: Files of a run that explaining does not read.
_LEFT_OUT = ("checkpoints", "tokenizer", ".lock", "trace.json.gz")


def main() -> None:
    """Plan, train and pack."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = ARCHIVE.parent.parent / "plan" / "training" / "work"
        source = "".join(path.read_text(encoding="utf-8") for path in sorted(work.glob("*.py")))
        (folder / "text.txt").write_text(source * 4, encoding="utf-8")
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        for command in (_PLAN, _RUN):
            words = [sys.executable, "-m", "rooftop", *command.split()]
            subprocess.run(words, cwd=folder, env=environment, check=True)
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            for path in sorted((folder / "demo").rglob("*")):
                name = str(path.relative_to(folder))
                if path.is_file() and not any(part in name for part in _LEFT_OUT):
                    content = _without_places(path.read_bytes(), folder)
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    print(f"written: {ARCHIVE.name}, {ARCHIVE.stat().st_size:,} bytes")


def _without_places(content: bytes, folder: Path) -> bytes:
    """The content without folders of this machine: others of the same length, since protocol buffers count bytes."""
    for place in (str(ARCHIVE.parent.parent.parent), sys.prefix, sys.base_prefix, str(folder)):
        other = "/" + "x" * (len(place) - 1)
        content = content.replace(place.encode(), other.encode())
    return content


if __name__ == "__main__":
    main()
