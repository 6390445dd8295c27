"""A recorded run that comes with rooftop, for ``rooftop explain --demo`` and ``rooftop ui --demo``.

``demo.tar.xz`` has the folder of a run of LLaMA's shape on eight emulated devices, without its checkpoints: plan,
records, trace and compiled step. ``docs/recording.py`` says which commands made it.
"""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
from pathlib import Path

from rooftop.core.files import cache_folder, publish

_ARCHIVE = Path(__file__).with_name("demo.tar.xz")


def demo_run() -> Path:
    """Return the folder of the recorded run, unpacked into the user's cache on first use."""
    content = hashlib.sha256(_ARCHIVE.read_bytes()).hexdigest()[:12]
    home = cache_folder("demo")
    folder = home / f"demo-{content}"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        with tarfile.open(_ARCHIVE) as archive:
            archive.extractall(scratch, filter="data")
        try:
            publish(Path(scratch) / "demo", folder)
        except OSError:
            # Another process was first.
            if not folder.exists():
                raise
    return folder
