"""Requests and when they come: from a file, or drawn at random."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError
from rooftop.core.files import read_bytes, read_text
from rooftop.core.quantities import parse_count

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Requests that are drawn at most, a day of 20 a second: each takes some kilobytes while it is simulated.
MOST_DRAWN = 2_000_000

#: A longer prompt or answer than any model takes is a slip.
MOST_TOKENS = 10**12

#: Columns of a trace and what others call them: Mooncake's open traces, Azure's, BurstGPT's.
_ARRIVAL = {"arrival_s": 1.0, "timestamp": 1e-3, "TIMESTAMP": 1.0, "Timestamp": 1.0}
_PROMPT = ("prompt_tokens", "input_length", "ContextTokens", "Request tokens")
_OUTPUT = ("output_tokens", "output_length", "GeneratedTokens", "Response tokens")
_HASHES = ("hashes", "hash_ids")


@dataclass(frozen=True, kw_only=True)
class RequestTrace:
    """Requests in order of arrival: arrays [request], times from the first arrival of the trace or from 0.

    ``hashes`` has, per request, a hash for each ``hash_tokens`` tokens of its prompt (the last may stand for fewer), in
    which all tokens before count; if it goes on, of the tokens generated too. Requests with equal hashes share KV.

    With ``clients`` the loop is closed: so many requests come at once, and each other one when an answer ends. Its
    ``arrival_s`` is then 0 until the requests have been served.
    """

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    hashes: tuple[tuple[int, ...], ...] | None = None
    hash_tokens: int = 512
    clients: int | None = None

    def __post_init__(self) -> None:
        if not len(self.arrival_s):
            raise RooftopError("trace", "no requests", "one request or more")
        if not np.isfinite(self.arrival_s).all() or self.arrival_s[0] < 0 or np.diff(self.arrival_s).min(initial=0) < 0:
            raise RooftopError("arrival_s", "times out of order", "times of 0 or more, in order")
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name).min() < 1:
                raise RooftopError(name, int(getattr(self, name).min()), "positive whole numbers")
        if self.hash_tokens < 1:
            raise RooftopError("hash_tokens", self.hash_tokens, "a positive whole number")
        if self.clients is not None and self.clients < 1:
            raise RooftopError("clients", self.clients, "a positive whole number")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def keys(self, request: int, page_tokens: int) -> tuple[int, ...]:
        """A key per full page of the prompt of ``request`` (and of what it generates, as far as hashes are known)."""
        if self.hashes is None:
            return ()
        hashes, prompt = self.hashes[request], int(self.prompt_tokens[request])
        hashes_per_page = self.hash_tokens // page_tokens
        keys = tuple(
            base + page for hashed in hashes for base in (hashed * hashes_per_page,) for page in range(hashes_per_page)
        )
        return keys[: prompt // page_tokens] if len(hashes) * self.hash_tokens < prompt + self.hash_tokens else keys


def draw_trace(
    *,
    requests_per_second: float,
    requests: int,
    prompt: Lengths,
    output: Lengths,
    burstiness: float = 1.0,
    seed: int = 0,
) -> RequestTrace:
    """Arrivals at random, ``requests_per_second`` on average, with lengths drawn independently.

    Times between arrivals follow a Gamma distribution of shape ``burstiness``, as serving benchmarks draw them: 1 is a
    Poisson process, below 1 requests come in bursts, above 1 they come more evenly. Raises RooftopError.
    """
    for name, value in (("requests_per_second", requests_per_second), ("burstiness", burstiness)):
        if not 0 < value < math.inf:
            raise RooftopError(name, value, "a positive number")
    if not 1 <= requests <= MOST_DRAWN:
        raise RooftopError("requests", requests, f"1 to {MOST_DRAWN:,}")
    random = np.random.default_rng(seed)
    gaps = random.gamma(burstiness, 1 / (requests_per_second * burstiness), requests)
    return RequestTrace(
        arrival_s=np.cumsum(gaps),
        prompt_tokens=prompt.draw(random, requests),
        output_tokens=output.draw(random, requests),
    )


def closed_trace(*, clients: int, requests: int, prompt: Lengths, output: Lengths, seed: int = 0) -> RequestTrace:
    """``requests`` requests of ``clients`` clients, each of which sends its next one when its last answer ends.

    Lengths are drawn independently. Raises RooftopError.
    """
    if not 1 <= clients <= MOST_DRAWN:
        raise RooftopError("clients", clients, f"1 to {MOST_DRAWN:,}")
    if not clients <= requests <= MOST_DRAWN:
        raise RooftopError("requests", requests, f"{clients:,} to {MOST_DRAWN:,}, one or more for each client")
    random = np.random.default_rng(seed)
    return RequestTrace(
        arrival_s=np.zeros(requests),
        prompt_tokens=prompt.draw(random, requests),
        output_tokens=output.draw(random, requests),
        clients=clients,
    )


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths in tokens, uniform from ``low`` to ``high``, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise RooftopError("length", f"{self.low}:{self.high}", "LOW:HIGH with 1 <= LOW <= HIGH")

    @classmethod
    def parse(cls, text: str, field: str) -> Lengths:
        """'512' or '128:1024'. Raises RooftopError, naming ``field``."""
        first, colon, second = text.partition(":")
        low = parse_count(first, field)
        high = parse_count(second, field) if colon else low
        if high < low:
            raise RooftopError(field, text, "LOW:HIGH with LOW no more than HIGH, such as 128:1024")
        return cls(low=low, high=high)

    def draw(self, random: np.random.Generator, count: int) -> Ints:
        """``count`` lengths."""
        return random.integers(self.low, self.high, count, endpoint=True)


#: Bytes of a trace. BurstGPT's 1.4 million requests are 60 MB.
_MOST_BYTES = 2**30


def read_trace(path: Path, *, hash_tokens: int = 512) -> RequestTrace:
    """The trace in a file: CSV with a header line, or JSONL (one object a line), by its suffix.

    Columns are ``arrival_s``, ``prompt_tokens``, ``output_tokens`` and optionally ``hashes`` (JSONL a list, CSV
    separated by blanks); the names that Mooncake's (``timestamp`` in milliseconds, ``input_length``, ``output_length``,
    ``hash_ids``), Azure's (``TIMESTAMP`` as a date, ``ContextTokens``, ``GeneratedTokens``) and BurstGPT's traces use
    are known too. Times count from the first arrival. Raises RooftopError that names the line.
    """
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv}
    if path.suffix not in readers:
        raise RooftopError("trace file", str(path), f"a file whose name ends with {' or '.join(readers)}")
    arrivals, prompts, outputs, hashes = [], [], [], list[tuple[int, ...]]()
    try:
        for line, row in readers[path.suffix](path):
            where = f"{path.name} line {line}"
            column = _column(row, tuple(_ARRIVAL), where)
            arrivals.append(_seconds(row[column], where) * _ARRIVAL[column])
            prompts.append(_whole(row, _PROMPT, where))
            outputs.append(_whole(row, _OUTPUT, where))
            hashes.append(_hashes(row, where))
    except OSError as error:
        raise RooftopError("trace file", str(path), f"a file that can be read ({error.strerror})") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise RooftopError("trace file", str(path), f"CSV or JSONL in UTF-8 ({error})") from None
    if not arrivals:
        raise RooftopError("trace file", str(path), "one request or more")
    order = np.argsort(np.array(arrivals), kind="stable")
    times = np.array(arrivals, np.float64)[order]
    return RequestTrace(
        arrival_s=times - times[0],
        prompt_tokens=np.array(prompts, np.int64)[order],
        output_tokens=np.array(outputs, np.int64)[order],
        hashes=tuple(hashes[index] for index in order) if any(hashes) else None,
        hash_tokens=hash_tokens,
    )


def _read_jsonl(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(io.StringIO(read_text(path, most=_MOST_BYTES)), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise RooftopError(f"{path.name} line {number}", line.strip()[:40], "a JSON object")
            yield number, row


def _read_csv(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    text = read_bytes(path, most=_MOST_BYTES).decode("utf-8-sig")
    for number, row in enumerate(csv.DictReader(io.StringIO(text, newline="")), start=2):
        # Cells beyond the header have no name.
        if None in row:
            raise RooftopError(f"{path.name} line {number}", ",".join(row[None]), "no more cells than the header")
        yield number, row


def _column(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        if row.get(name) is not None:
            return name
    raise RooftopError(where, ", ".join(str(key) for key in row), f"a value for {' or '.join(names)}")


def _seconds(value: Any, where: str) -> float:
    try:
        if isinstance(value, str) and ":" in value:
            # Seven decimals, as Azure writes, are one more than Python reads before 3.11's successors.
            head, _, decimals = value.strip().partition(".")
            return datetime.fromisoformat(head + "+00:00").timestamp() + float(f"0.{decimals or 0}")
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise RooftopError(where, value, "a time of arrival: a number or YYYY-MM-DD HH:MM:SS")
    return seconds


def _whole(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> int:
    column = _column(row, names, where)
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = math.nan
    if not 1 <= value <= MOST_TOKENS or value != int(value) or isinstance(row[column], bool):
        raise RooftopError(f"{where}, {column}", row[column], f"a positive whole number up to {MOST_TOKENS:,}")
    return int(value)


def _hashes(row: Mapping[str, Any], where: str) -> tuple[int, ...]:
    ids = next((row[name] for name in _HASHES if row.get(name) is not None), ())
    try:
        values = tuple(int(value) for value in ids.split()) if isinstance(ids, str) else tuple(ids)
    except (TypeError, ValueError):
        values = (None,)
    if not all(type(value) is int for value in values):
        raise RooftopError(where, ids, "hashes as whole numbers")
    return values
