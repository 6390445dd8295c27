"""metrics.jsonl of a training run: the loss of every batch, each written down once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from rooftop.errors import RooftopError
from rooftop.files import write_text


def keep_metrics(path: Path, batch: int) -> None:
    """Leave the losses of the batches before ``batch`` in the file ``path``, if there is one, and drop the others.

    A process that was killed may have recorded more batches than it saved; they are trained on again, with the same
    losses. Raises RooftopError where the file cannot be read or written.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise RooftopError("metrics", str(path), f"losses that can be read ({error})") from None
    kept = "".join(_before(text, batch))
    if kept != text:
        write_text(path, kept)


def append_metrics(path: Path, losses: Iterable[float], first: int) -> None:
    """Write losses down, of the batches from ``first`` on; what is no finite number is null. Raises RooftopError."""
    lines = [
        json.dumps({"batch": batch, "loss": loss if math.isfinite(loss) else None})
        for batch, loss in enumerate(losses, start=first)
    ]
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise RooftopError("metrics", str(path), f"a file with room for it ({error.strerror})") from None


def _before(text: str, batch: int) -> Iterator[str]:
    """The whole lines of batches before ``batch``."""
    for line in text.splitlines(keepends=True):
        try:
            if json.loads(line)["batch"] < batch and line.endswith("\n"):
                yield line
        except (ValueError, KeyError, TypeError):
            return
