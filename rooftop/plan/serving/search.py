"""The search over placements and batches on one slice: time, memory, and the front of the best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import Floats
from rooftop.core.errors import RooftopError
from rooftop.core.records import Record
from rooftop.core.rounding import ceil_div
from rooftop.hardware import Slice
from rooftop.plan.serving.placement import Placed, Placement, together
from rooftop.plan.serving.problem import ServingProblem
from rooftop.roofline.rules import interleaved_tokens_per_s

#: The largest batch that is looked at.
MOST_SEQUENCES = 2**20
#: Batches that are tried at once when the largest that fits is sought.
_AT_A_TIME = 2**7


def batch_grid(most: int, also: Iterable[int] = ()) -> Floats:
    """Batches to look at: all up to 16, then eight to every doubling, ``most`` and those of ``also`` included."""
    grown = {round(2 ** (power / 8)) for power in range(8 * (most.bit_length() + 1))}
    sizes = grown | set(range(1, 17)) | {most, *also}
    return np.array(sorted(size for size in sizes if 0 < size <= most), np.float64)


def server_batches(problem: ServingProblem, placements: Sequence[Placement]) -> Floats:
    """``batch_grid`` up to the largest batch of any placement, with the largest of each; empty if none has room."""
    largest = most_of_each(problem, placements)
    return batch_grid(max(largest), [even_batch(most, place) for most, place in zip(largest, placements, strict=True)])


@dataclass(frozen=True, kw_only=True)
class GenerateSweep:
    """Every placement of generation with every batch, [P, B]: seconds of a step and whether it fits."""

    problem: ServingProblem
    placements: Sequence[Placement]
    batches: Floats
    expected_s: Floats
    memory_bytes: Floats

    @property
    def fits(self) -> npt.NDArray[np.bool_]:
        """Candidates that stay within the device's memory, [P, B]."""
        fits: npt.NDArray[np.bool_] = self.memory_bytes <= self.problem.capacity
        return fits

    @cached_property
    def fastest_s(self) -> Floats:
        """The fastest step that fits, by batch, [B]; infinite where none does."""
        seconds: Floats = np.where(self.fits, self.expected_s, np.inf).min(axis=0)
        return seconds

    def best(self, at: int) -> Placement:
        """The fastest placement of the batch at a position; the one that needs the least memory if none fits."""
        if np.isfinite(self.fastest_s[at]):
            return self.placements[int(np.argmin(np.where(self.fits[:, at], self.expected_s[:, at], np.inf)))]
        return self.placements[int(np.argmin(self.memory_bytes[:, at]))]

    def choices(self) -> list[BatchChoice]:
        """The fastest placement of every batch that fits, smallest batch first; see ``choices_of``."""
        return choices_of([self])[0]


@dataclass(frozen=True, kw_only=True)
class BatchChoice:
    """A batch, its placement, and the seconds between two tokens of a sequence."""

    placement: Placement
    batch: int
    seconds: float


def even_batch(batch: int, placement: Placement) -> int:
    """The batch, rounded down to a multiple of the groups of devices that share it if it has more sequences."""
    return batch - batch % placement.spread if batch > placement.spread else batch


def choices_of(sweeps: Sequence[GenerateSweep]) -> list[list[BatchChoice]]:
    """For each of several slices of one chip the fastest placement of every batch that fits, smallest batch first.

    A batch of more sequences than groups of devices is rounded down to a multiple of the groups: other slots of an
    engine would stay empty.
    """
    chosen: list[dict[int, BatchChoice]] = []
    rounded: dict[tuple[int, int, int], Placement] = {}
    for number, swept in enumerate(sweeps):
        fastest: dict[int, BatchChoice] = {}
        for at in np.flatnonzero(np.isfinite(swept.fastest_s)).tolist():
            placement, size = swept.best(at), int(swept.batches[at])
            batch = even_batch(size, placement)
            if batch == size:
                fastest[batch] = BatchChoice(placement=placement, batch=batch, seconds=float(swept.fastest_s[at]))
            else:
                rounded[number, id(placement), batch] = placement
        chosen.append(fastest)
    if rounded:
        seconds = price_each(sweeps[0].problem, list(rounded.values()), [batch for _, _, batch in rounded])
        for ((number, _, batch), placement), step_s in zip(rounded.items(), seconds.tolist(), strict=True):
            fastest = chosen[number]
            if batch not in fastest or step_s < fastest[batch].seconds:
                fastest[batch] = BatchChoice(placement=placement, batch=batch, seconds=step_s)
    return [[fastest[batch] for batch in sorted(fastest)] for fastest in chosen]


def sweep_generate(problem: ServingProblem, placements: Sequence[Placement], batches: Floats) -> GenerateSweep:
    """Price every placement with every batch. With a draft model a step is a round over the tokens that it yields."""
    return sweep_slices([problem], [placements], [batches])[0]


def sweep_slices(
    problems: Sequence[ServingProblem], placements: Sequence[Sequence[Placement]], batches: Sequence[Floats]
) -> list[GenerateSweep]:
    """``sweep_generate`` of one job on several slices of a chip at once, each with its own placements and batches."""
    if not problems:
        return []
    most = max(map(len, batches))
    # Rows of fewer batches repeat their last one.
    rows = [np.append(own, np.full(most - len(own), own[-1])) for own in batches]
    every = [placement for some in placements for placement in some]
    sizes = np.repeat(rows, [len(some) for some in placements], axis=0)
    memory, expected = np.empty(sizes.shape), np.empty(sizes.shape)
    for at, some in together(every):
        # One batch is priced with plain numbers, which are several times as fast as arrays of one.
        one = len(batches) == most == 1
        own_sizes = float(sizes[0, 0]) if one else sizes[at[:1]] if len(batches) == 1 else sizes[at]
        memory[at] = server_memory(problems[0], some, own_sizes)
        expected[at] = token_s(problems[0], some, own_sizes)
    ends = np.cumsum([len(some) for some in placements]).tolist()
    return [
        GenerateSweep(
            problem=problem,
            placements=some,
            batches=own,
            expected_s=expected[end - len(some) : end, : len(own)],
            memory_bytes=memory[end - len(some) : end, : len(own)],
        )
        for problem, some, own, end in zip(problems, placements, batches, ends, strict=True)
    ]


def price_each(problem: ServingProblem, placements: Sequence[Placement], batches: Sequence[int]) -> Floats:
    """``token_s`` of every placement with a batch of its own, [P]."""
    expected, own = np.empty((len(placements), 1)), np.array(batches, np.float64)[:, None]
    for rows, some in together(placements):
        expected[rows] = token_s(problem, some, own[rows])
    return expected[:, 0]


@dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """Seconds of a round of speculative decoding, arrays over batches: all ``guess_s`` together, then one check."""

    guess_s: Any
    check_s: Any

    @property
    def round_s(self) -> Any:
        """The whole round."""
        return self.guess_s + self.check_s


def round_times(problem: ServingProblem, placement: Placed, batch: Any) -> RoundTimes:
    """Seconds of the draft model and of the large one in a round. The problem has a draft."""
    draft = problem.draft
    assert draft is not None
    guess = problem.generate_s(placement, batch, model=draft.model)
    check = problem.generate_s(placement, batch, guesses=draft.length)
    return RoundTimes(guess_s=draft.length * guess, check_s=check)


def token_s(problem: ServingProblem, placement: Placed, batch: Any) -> Any:
    """Expected seconds between two tokens of a sequence while nothing else runs: a step, or a round's share."""
    if problem.draft is None:
        return problem.generate_s(placement, batch)
    return round_times(problem, placement, batch).round_s / problem.draft.tokens_per_round


def prefills_in_steps(problem: ServingProblem) -> bool:
    """Return True if prompts are prefilled in steps that also generate, as engines do."""
    return problem.mode == "interleaved" and problem.engine is not None


def prompt_between_s(problem: ServingProblem, placement: Placement, batch: int) -> float:
    """Seconds that the prefill of a prompt on a generate server puts between two tokens of its other sequences."""
    if not prefills_in_steps(problem):
        return float(problem.prompt_interval_s(problem.shared_prefill(placement)))
    new, size = float(problem.workload.new_prompt_tokens), float(batch)
    mixed_s = float(problem.mixed_s(placement, new, size, problem.step_context))
    return max(mixed_s - float(problem.generate_s(placement, size)), 0.0)


def server_tokens_per_s(problem: ServingProblem, placement: Placement, batch: int, token_s: float) -> float:
    """Tokens per second of a full generate server, between two of whose tokens ``token_s`` pass if nothing else runs.

    Interleaved, it prefills the prompts of its sequences too.
    """
    if problem.mode == "disaggregated":
        return batch / token_s
    generate, between_s = problem.workload.generate, prompt_between_s(problem, placement, batch)
    if prefills_in_steps(problem):
        # Each of G steps has the batch's tokens, and B of the prompts make them longer.
        return batch / (token_s + batch / generate * between_s)
    return interleaved_tokens_per_s(token_s, between_s, batch, generate)


def server_memory(problem: ServingProblem, placement: Placed, batch: Any) -> Any:
    """Bytes on a device of a generate server, which also prefills where the two are interleaved."""
    return problem.memory(placement, batch, prefilling=problem.mode == "interleaved", generating=True).total


def most_sequences(problem: ServingProblem, placement: Placement) -> int:
    """The largest batch that fits a server, up to MOST_SEQUENCES; 0 if not one sequence does."""
    return most_of_each(problem, [placement])[0]


def most_of_each(problem: ServingProblem, placements: Sequence[Placement]) -> list[int]:
    """``most_sequences`` of every placement."""
    most = [0] * len(placements)
    for rows, some in together(placements):
        # Memory does not fall with the batch: the last that fits is sought among so many at a time, ever closer.
        fitting, apart = np.zeros((len(rows), 1)), MOST_SEQUENCES
        while apart > 1:
            apart = ceil_div(apart, _AT_A_TIME)
            batches = fitting + apart * np.arange(1.0, _AT_A_TIME + 1)
            fits = (server_memory(problem, some, batches) <= problem.capacity) & (batches <= MOST_SEQUENCES)
            fitting = fitting + apart * np.count_nonzero(fits, axis=-1, keepdims=True)
        for row, count in zip(rows, fitting[:, 0].tolist(), strict=True):
            most[row] = int(count)
    return most


def price_prompts(problem: ServingProblem, placements: Sequence[Placement]) -> Floats:
    """Seconds of a prompt under every placement, [P]."""
    seconds = np.empty((len(placements), 1))
    for rows, some in together(placements):
        seconds[rows] = problem.prompt_s(some)
    return seconds[:, 0]


@dataclass(frozen=True, kw_only=True)
class PrefillSweep:
    """Every placement of a prefill, [P]: seconds of a prompt and bytes of a device."""

    problem: ServingProblem
    placements: Sequence[Placement]
    seconds: Floats
    memory_bytes: Floats

    @classmethod
    def of(cls, problem: ServingProblem, placements: Sequence[Placement]) -> PrefillSweep:
        """Price the placements."""
        return cls.of_slices([problem], [placements])[0]

    @classmethod
    def of_slices(
        cls, problems: Sequence[ServingProblem], placements: Sequence[Sequence[Placement]]
    ) -> list[PrefillSweep]:
        """Price the placements of one job on several slices of a chip at once."""
        every = [placement for some in placements for placement in some]
        memory_bytes = np.empty((len(every), 1))
        for rows, some in together(every):
            memory_bytes[rows] = problems[0].memory(some, 1.0, prefilling=True, generating=False).total
        seconds = price_prompts(problems[0], every) if every else np.empty(0)
        ends = np.cumsum([len(some) for some in placements]).tolist()
        return [
            cls(
                problem=problem,
                placements=some,
                seconds=seconds[end - len(some) : end],
                memory_bytes=memory_bytes[end - len(some) : end, 0],
            )
            for problem, some, end in zip(problems, placements, ends, strict=True)
        ]

    def best(self, kind: tuple[object, ...] | None = None) -> tuple[Placement, float] | None:
        """The fastest placement that fits (that needs the least memory if none does), and its seconds.

        ``kind``: only those with such a cache (``ServingProblem.cache_kind``); None if there are none.
        """
        among = [at for at, place in enumerate(self.placements) if kind in (None, self.problem.cache_kind(place))]
        if not among:
            return None
        seconds, memory = self.seconds[among], self.memory_bytes[among]
        fits = memory <= self.problem.capacity
        at = among[int(np.argmin(np.where(fits, seconds, np.inf) if fits.any() else memory))]
        return self.placements[at], float(self.seconds[at])


def best_prefill(problem: ServingProblem, placements: Sequence[Placement]) -> tuple[Placement, float]:
    """The best placement of a prefill, and its seconds. Raises RooftopError if there are none to choose from."""
    best = PrefillSweep.of(problem, placements).best()
    if best is None:
        raise RooftopError("slice", problem.prefill_server.name, f"one that splits the {problem.model.heads} heads")
    return best


def smallest_slice(problem: ServingProblem, batch: int) -> Slice | None:
    """The fewest chips of this kind on which ``batch`` sequences fit; None if no slice of the catalogue holds them."""
    for slice_ in slices_of(problem.slice):
        try:
            candidate = replace(problem, slice=slice_, axes=None, prefill_axes=None)
            placements = candidate.nearest_engines(candidate.generate_placements())
        except RooftopError:
            continue
        for placement in placements:
            if float(server_memory(candidate, placement, float(batch))) <= candidate.capacity:
                return slice_
    return None


def slices_of(like: Slice) -> list[Slice]:
    """Slices of the same chip that the catalogue lists (whole nodes of GPUs up to four), smallest first."""
    chip = like.chip
    shapes = [(*shape, 1) if chip.switched else shape for shape in chip.slice_shapes]
    if chip.wrap == "cube":
        shapes += [(4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8)]
    if chip.switched:
        shapes += [(max(shape[0] for shape in shapes), nodes) for nodes in (2, 4)]
    slices = [Slice(chip, shape) for shape in dict.fromkeys(shapes)]
    return sorted(slices, key=lambda slice_: (slice_.chips, slice_.shape))


@dataclass(frozen=True, kw_only=True)
class FrontPoint(Record):
    """A batch at which no other has both a shorter step and more tokens/s, with its mesh."""

    context: float
    batch: int
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_chip: float
    usd_per_million_tokens: float | None
    mesh: Mapping[str, int]


def pareto(
    problem: ServingProblem, placements: Sequence[Placement], contexts: Sequence[int] | None = None
) -> list[FrontPoint]:
    """Batches at which no other has both a shorter step and more tokens/s, for every context (chapter 8).

    Without ``contexts`` for the workload as it is; at a given context a sequence has room for no more than that.
    """
    points: list[FrontPoint] = []
    price = problem.slice.price_usd_per_hour
    for sized in [problem] if contexts is None else [at_context(problem, context) for context in contexts]:
        context = sized.step_context
        most = max(most_of_each(sized, placements))
        if most == 0:
            continue
        swept = sweep_generate(sized, placements, batch_grid(most))
        best_rate = 0.0
        for choice in sorted(swept.choices(), key=lambda choice: choice.seconds):
            seconds = choice.seconds
            rate = server_tokens_per_s(sized, choice.placement, choice.batch, seconds)
            if rate <= best_rate:
                continue
            best_rate = rate
            points.append(
                FrontPoint(
                    context=context,
                    batch=choice.batch,
                    step_s=seconds,
                    tokens_per_s=rate,
                    tokens_per_s_per_chip=rate / problem.slice.chips,
                    usd_per_million_tokens=None if price is None else price / 3600 / rate * 1e6,
                    mesh={name: size for name, size in choice.placement.mesh.shape.items() if size > 1},
                )
            )
    return points


def at_context(problem: ServingProblem, context: int) -> ServingProblem:
    """The problem with caches of ``context`` tokens, in time and in memory. Raises RooftopError below two tokens."""
    if context < 2:
        raise RooftopError("context", context, "two tokens or more: a prompt and an answer")
    generate = min(problem.workload.generate, context // 2)
    workload = replace(problem.workload, context=context, prompt=context - generate, generate=generate)
    return replace(problem, workload=workload)
