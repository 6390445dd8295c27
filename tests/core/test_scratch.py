"""Temporary folders end with their process, and those of killed ones at the next use."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rooftop.core.printable import printable
from rooftop.core.scratch import scratch_folder

_HOLD = """
import sys
from rooftop.core.scratch import scratch_folder
with scratch_folder("rooftop-probe-") as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_folders_of_killed_processes_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    folders = [Path(str(process.stdout and process.stdout.readline()).strip()) for process in holders]
    killed, alive = holders
    killed.kill()
    killed.wait()
    foreign = tmp_path / "rooftop-probe-foreign"
    foreign.mkdir()
    for folder in (*folders, foreign):
        (folder / "data").write_text("x")
        os.utime(folder, (0, 0))
    with scratch_folder("rooftop-probe-") as own:
        # A folder without a lock is not ours to remove.
        assert own.is_dir() and not folders[0].exists() and folders[1].is_dir() and foreign.is_dir()
    assert not own.exists()
    alive.communicate("")
    assert not folders[1].exists()
    killed.communicate()


def test_control_characters_are_shown() -> None:
    assert printable("m\x1b[31mRED\x9b1m\r\x7f") == "m\\x1b[31mRED\\x9b1m\\x0d\\x7f"
    assert printable("Größe\t日本語 🙂\nb") == "Größe\t日本語 🙂\nb"
