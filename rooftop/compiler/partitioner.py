"""Warnings of XLA's partitioner: arrays that it makes whole on every device, because it knows no shorter way.

XLA:TPU writes them to libtpu's log, a file of the process in the folder $TPU_LOG_DIR.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from rooftop.compiler.hlo.scopes import StackFrame
from rooftop.compiler.hlo.text import parse

#: libtpu's own default.
_FOLDER = "/tmp/tpu_logs"
_WARNING = re.compile(
    r"Involuntary full rematerialization\. The compiler (?:cannot|was not able to) go from sharding (\{.*?\}) to "
    r"(\{.*?\}) (?:efficiently|without doing a full rematerialization of the tensor) for HLO operation:? "
    r"%?([^\s=]+) = (\S+?\[[\d,]*\])(.*)"
)


@dataclass(frozen=True, kw_only=True)
class FullRematerialization:
    """An array that is gathered on every device, to be split in another way.

    ``array`` is its type on one device before, such as 'f32[512,128]'; ``before`` and ``after`` are shardings as HLO
    writes them. ``op_name`` is the operation of the program, and ``stack`` has its frames, innermost first.
    """

    array: str
    before: str
    after: str
    op_name: str
    stack: tuple[StackFrame, ...]


def rematerializations(log: str, folder: Path) -> tuple[FullRematerialization, ...]:
    """The warnings in a log, equal ones once; stack frames are numbered as in XLA's reports in ``folder``."""
    lines = _WARNING.findall(log)
    # The optimised program numbers its frames anew.
    written = next(folder.glob("*.before_optimizations.txt"), None) if lines else None
    stacks = {} if written is None else parse(written.read_text(encoding="utf-8")).stacks
    warnings: dict[FullRematerialization, None] = {}
    for before, after, _, array, rest in lines:
        name, frame = re.search(r'op_name="([^"]*)"', rest), re.search(r"stack_frame_id=(\d+)", rest)
        warning = FullRematerialization(
            array=array,
            before=before.strip("{}"),
            after=after.strip("{}"),
            op_name=name.group(1) if name else "",
            stack=tuple(stacks.get(int(frame.group(1)), ())) if frame else (),
        )
        warnings[warning] = None
    return tuple(warnings)


@dataclass(kw_only=True)
class DriverLog:
    """Lines that libtpu adds to the log of this process from now on."""

    _sizes: dict[Path, int] = field(init=False)

    def __post_init__(self) -> None:
        self._sizes = {path: path.stat().st_size for path in self._files()}

    def read(self) -> str:
        """The lines that were added; '' if libtpu writes no log."""
        added = []
        for path in self._files():
            try:
                with path.open("rb") as log:
                    log.seek(self._sizes.get(path, 0))
                    added.append(log.read().decode(errors="replace"))
            except OSError:
                continue
        return "".join(added)

    @staticmethod
    def _files() -> list[Path]:
        """Logs of warnings of this process; a long log has several."""
        folder = Path(os.environ.get("TPU_LOG_DIR", _FOLDER))
        return sorted(folder.glob(f"*.WARNING.*.{os.getpid()}"))
