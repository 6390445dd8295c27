"""Step times that an engine measured, for a simulation of that engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rooftop.core.errors import RooftopError

#: Chunks of prompts that are prefilled one by one, even if a padded program could take them together.
_FEW = 4


@dataclass(frozen=True, kw_only=True)
class MeasuredProgram:
    """A compiled program with room for ``sequences`` sequences, that read up to ``context_tokens`` tokens of KV each.

    It prefills ``tokens`` new tokens in all, or with 0 generates a token for each sequence; next to those that it
    prefills, it may have room for ``generating`` others. A run takes ``seconds``.
    """

    sequences: int
    tokens: int
    context_tokens: int
    generating: int = 0
    seconds: float

    @property
    def width(self) -> int:
        """New tokens of each sequence."""
        return self.tokens // self.sequences


@dataclass(frozen=True, kw_only=True)
class MeasuredTimes:
    """``StepTimes`` of an engine with static shapes: a step takes as long as the programs that it is padded to.

    Only programs that ran are known; what would need another one is priced as the nearest. ``overhead_s`` is what each
    step takes next to its programs. ``kv_tokens`` are those of all ``kv_groups`` groups of devices together. Of an
    engine of two parts they are those of the one that generates; the other one has ``prefill_kv_tokens`` in
    ``prefill_kv_groups``, and sends the KV of a sequence in ``handover_s``.
    """

    page_tokens: int
    kv_tokens: int
    programs: tuple[MeasuredProgram, ...]
    overhead_s: float = 0.0
    kv_groups: int = 1
    prefill_kv_tokens: int = 0
    prefill_kv_groups: int = 1
    handover_s: float | None = None

    def __post_init__(self) -> None:
        if not self._generates or not self._prefills:
            accepted = "programs that prefill and programs that generate: requests that were served before"
            raise RooftopError("measured programs", len(self.programs), accepted)

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Time of the narrowest programs that hold the chunks, as many at a time as a program has rows."""
        return self.overhead_s + sum(self._run_s(run) for run in self._runs(chunks))

    def generate_s(self, batch: int, context_tokens: int) -> float:
        """Time of the smallest program for the batch and its mean context."""
        return self.overhead_s + self._generate_s(batch, context_tokens)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """Time of one program after another. The first prefill shares one with the batch, if there is one."""
        if not batch:
            return self.prefill_s(chunks)
        runs = list(self._runs(chunks))
        first = self._mixed(batch, runs[0]) if runs else []
        if first:
            seconds, runs = _nearest(first, max(runs[0].context_tokens, context_tokens // batch + 1)), runs[1:]
        else:
            seconds = self._generate_s(batch, context_tokens)
        return self.overhead_s + seconds + sum(self._run_s(run) for run in runs)

    def transfer_s(self, tokens: int) -> float:
        """The mean time of a transfer, whatever its size. Raises RooftopError if none was measured."""
        if self.handover_s is None:
            raise RooftopError("batching", "disaggregated", "interleaved: transfers were not measured")
        return self.handover_s

    def host_copy_s(self, tokens: int) -> float:
        """Raises RooftopError: copies are not measured separately."""
        raise RooftopError("host_kv_tokens", tokens, "0: copies to the host were not measured")

    @cached_property
    def _generates(self) -> list[MeasuredProgram]:
        decode_programs = [program for program in self.programs if not program.tokens]
        return sorted(decode_programs, key=lambda program: (program.sequences, program.context_tokens))

    @cached_property
    def _prefills(self) -> dict[int, list[MeasuredProgram]]:
        """Programs by width, in ascending order."""
        by_width: dict[int, list[MeasuredProgram]] = {}
        prefills = [program for program in self.programs if program.tokens and not program.generating]
        for program in sorted(prefills, key=lambda program: (program.width, program.context_tokens)):
            by_width.setdefault(program.width, []).append(program)
        return by_width

    def _size(self, batch: int) -> int:
        """Rows of the smallest program that generates for ``batch`` sequences."""
        sizes = [program.sequences for program in self._generates]
        return min((size for size in sizes if size >= batch), default=sizes[-1])

    def _generate_s(self, batch: int, context_tokens: int) -> float:
        size = self._size(batch)
        return _nearest(
            [program for program in self._generates if program.sequences == size], context_tokens // batch + 1
        )

    def _mixed(self, batch: int, run: _Run) -> list[MeasuredProgram]:
        """The programs that do a run and generate, smallest context first."""
        size = self._size(batch)
        shape = (run.rows, run.rows * run.width)
        return sorted(
            (
                program
                for program in self.programs
                if program.generating == size and (program.sequences, program.tokens) == shape
            ),
            key=lambda program: program.context_tokens,
        )

    def _runs(self, chunks: Sequence[tuple[int, int]]) -> Iterator[_Run]:
        """The programs that prefill (tokens, tokens before them), in the engine's order."""
        widths = [*self._prefills]
        waves: dict[tuple[int, int], list[int]] = {}
        for tokens, before in chunks:
            for wave, start in enumerate(range(0, tokens, widths[-1])):
                size = min(widths[-1], tokens - start)
                width = next(width for width in widths if width >= size)
                waves.setdefault((wave, width), []).append(before + start + size)
        for (_, width), ends in sorted(waves.items(), key=lambda wave: wave[0]):
            rows = {program.sequences for program in self._prefills[width]}
            while ends:
                count = prefill_rows(len(ends), max(rows))
                count = count if count in rows else max(rows)
                taken, ends = ends[:count], ends[count:]
                yield _Run(rows=count, width=width, context_tokens=max(taken))

    def _run_s(self, run: _Run) -> float:
        return _nearest(
            [program for program in self._prefills[run.width] if program.sequences == run.rows], run.context_tokens
        )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Pieces of prompts that a program with ``rows`` of ``width`` prefills; the longest then has so many tokens."""

    rows: int
    width: int
    context_tokens: int


def prefill_rows(pieces: int, full: int) -> int:
    """Rows of the program that prefills the first of so many ``pieces`` of one width: 1, or ``full``.

    A few go one by one: in a full program that is half padding they take longer where compute binds, and where the
    bytes of the weights bind a single one, a full program takes some such times as well.
    """
    return 1 if pieces <= max(1, min(_FEW, full // 2)) else full


def _nearest(programs: list[MeasuredProgram], context_tokens: int) -> float:
    """The time of the smallest program that reads ``context_tokens`` tokens; of the largest if none does."""
    enough = [program for program in programs if program.context_tokens >= context_tokens]
    return (min(enough, key=lambda program: program.context_tokens) if enough else programs[-1]).seconds
