"""The metrics of a run as TensorBoard events, beside metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Events:
    """An event file in ``folder``; TensorBoard shows those of the folder as one run.

    What earlier files have of steps behind ``step`` is void: they are done again. Needs tensorboardX.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        from tensorboardX import SummaryWriter

        # The name has the second in which the file was made: the step keeps a quick restart from writing over it.
        self._writer = SummaryWriter(
            str(folder), purge_step=step + 1 if step else None, filename_suffix=f".behind{step}"
        )

    def append(self, record: Mapping[str, Any]) -> None:
        """One point for every number of a line of metrics.jsonl, at its step; evaluations under ``eval/``."""
        for name, value in record.items():
            if name in ("step", "unix_s") or value is None:
                continue
            group, _, rest = name.partition("_")
            tag = f"eval/{rest}" if group == "eval" else f"train/{name}"
            self._writer.add_scalar(tag, value, record["step"], walltime=record.get("unix_s"))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
