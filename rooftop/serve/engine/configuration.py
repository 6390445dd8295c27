"""Configuration of an engine: its policy, its cache, and the shapes that its programs are compiled for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rooftop.arrays.rules import REPLICA_AXES, ways
from rooftop.capabilities import (
    ENGINE_AXES,
    ENGINE_CACHES,
    ENGINE_WEIGHTS,
    KV_SPLITS,
    PAGE_TOKENS,
    KvSplit,
    engine_mesh_hint,
)
from rooftop.core.errors import RooftopError, unknown
from rooftop.scheduling.serving.scheduler import ROLES, Policy
from rooftop.simulate.serving.measured import prefill_rows

#: How weights are held: as they come, or in a format of ``rooftop.programs.serving.formats``.
WEIGHTS: tuple[str, ...] = tuple(ENGINE_WEIGHTS.values())
#: How the cache holds keys and values.
CACHES: tuple[str, ...] = tuple(ENGINE_CACHES.values())
DTYPES: tuple[str, ...] = ("float32", "bfloat16")
#: Tokens of a sequence up to which its block table is too short to matter.
_TABLE_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sizes that steps are padded to; each combination is a program.

    A step generates for ``batches`` sequences, or prefills ``widths`` tokens of one or, together, of as many sequences
    as make ``prefill_tokens``. Block tables hold ``contexts`` tokens.
    """

    batches: tuple[int, ...]
    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    prefill_tokens: int

    def __post_init__(self) -> None:
        for name in ("batches", "widths", "contexts"):
            sizes = getattr(self, name)
            if not sizes or sorted(set(sizes)) != list(sizes) or sizes[0] < 1:
                raise RooftopError(name, sizes, "sizes in ascending order")

    @classmethod
    def of(
        cls, *, max_batch: int, longest: int, page_tokens: int, prefill_tokens: int, reader: str, least: int = 1
    ) -> Shapes:
        """By default: batches double, widths and contexts quadruple. Batches have a multiple of ``least`` rows.

        Where a ``reader`` of ``programs.serving.paged`` reads what there is, whatever its tables could hold, contexts
        only save the transfer of long tables.
        """
        # Imported here: a configuration is checked before JAX is imported.
        from rooftop.programs.serving.paged import BLOCK

        pages = -(-longest // page_tokens) * page_tokens
        whole = BLOCK if reader == "gather" else _TABLE_TOKENS
        first = 256 if reader == "gather" else _TABLE_TOKENS
        short = _grown(min(-(-first // page_tokens) * page_tokens, pages), min(whole, pages), 4)
        return cls(
            batches=tuple(sorted({-(-size // least) * least for size in _grown(1, max_batch, 2)})),
            widths=tuple(_grown(max(16, least), max(16, least, min(prefill_tokens, longest)), 4)),
            contexts=tuple(sorted({*(-(-size // page_tokens) * page_tokens for size in short), pages})),
            prefill_tokens=prefill_tokens,
        )

    @property
    def prefills(self) -> list[tuple[int, int]]:
        """Rows and width of each prefill."""
        return sorted({(rows, width) for width in self.widths for rows in (1, max(1, self.prefill_tokens // width))})

    @property
    def mixed(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Rows and width of what generates and of what is prefilled with it: one piece, next to the largest batch.

        Smaller batches would each need programs of their own, and gain less: weights are read once for both.
        """
        return [((self.batches[-1], 1), (1, width)) for width in self.widths]

    def rows(self, pieces: int, width: int) -> int:
        """Number of rows of the next prefill of this many pieces of one width."""
        return prefill_rows(pieces, max(1, self.prefill_tokens // width))


def covering(sizes: Sequence[int], size: int) -> int:
    """The smallest of ``sizes`` that is ``size`` or more; the largest if none is."""
    return sizes[min(bisect_left(sizes, size), len(sizes) - 1)]


def _grown(first: int, last: int, factor: int) -> Iterable[int]:
    while first < last:
        yield first
        first *= factor
    yield last


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Configuration of an engine.

    ``policy`` is what the simulator simulates; with 'disaggregated' batching the first ``prefill_devices`` of the
    devices prefill and the others generate, or, in two processes, those of one and of the other ``role``. A sequence
    has at most ``longest`` tokens (None: as many as the model allows and the cache holds). The cache has ``pages`` of
    ``page_tokens`` (None: what memory allows) and ``host_pages`` in the host's memory. With ``prefix_cache`` prompts
    that begin alike share pages. ``max_queue`` requests may wait. ``mesh``: sizes of ``ENGINE_AXES``; ``kv_split``:
    what context splits; of ``max_batch`` each of the ``copies`` that data makes has its share. At most ``guesses``
    tokens of a sequence are guessed in a step and checked together: looked up in the text (see
    ``rooftop.serve.engine.guessing``), or by a draft model.
    """

    policy: Policy = field(default_factory=lambda: Policy(max_batch=32, chunk_tokens=256))
    page_tokens: int = PAGE_TOKENS
    pages: int | None = None
    host_pages: int = 0
    prefix_cache: bool = True
    longest: int | None = None
    max_queue: int = 1024
    mesh: tuple[tuple[str, int], ...] = ()
    kv_split: KvSplit = "seq"
    prefill_devices: int = 0
    role: str = "both"
    dtype: str | None = None
    weights: str = "plain"
    cache: str = "plain"
    shapes: Shapes | None = None
    guesses: int = 0

    @property
    def copies(self) -> int:
        """Replicas that prefill and generate, each with a cache of its own."""
        return ways(dict(self.mesh), *REPLICA_AXES)

    @property
    def own_policy(self) -> Policy:
        """Policy of one of the ``copies``."""
        return replace(self.policy, max_batch=-(-self.policy.max_batch // self.copies))

    def __post_init__(self) -> None:
        least_of = {"guesses": 0, "page_tokens": 1, "host_pages": 0, "max_queue": 1, "prefill_devices": 0}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise RooftopError(name, getattr(self, name), f"a whole number of {least} or more")
        for name, known in (("weights", WEIGHTS), ("cache", CACHES), ("role", ROLES), ("kv_split", KV_SPLITS)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        if self.policy.batching == "static":
            raise RooftopError("batching", "static", "interleaved or disaggregated: static batching is only simulated")
        if self.role != "both" and self.policy.batching != "disaggregated":
            raise RooftopError("batching", self.policy.batching, f"disaggregated, of which {self.role} is a part")
        for axis, _ in self.mesh:
            if axis not in ENGINE_AXES:
                raise unknown("mesh axis of an engine", axis, ENGINE_AXES)
        if self.copies > 1 and self.policy.batching == "disaggregated":
            raise RooftopError("mesh axis data", self.copies, "1 with disaggregated batching")


def configuration_of(plan: Mapping[str, Any]) -> Configuration:
    """Return the configuration of a serving plan (plan.json of kind 'serve'): batch, devices, weights and cache.

    These are plain where the plan has a format that no engine has. Raises RooftopError for another kind of plan, and
    where its axes split what an engine does not.
    """
    if plan.get("kind") != "serve":
        raise RooftopError("plan kind", plan.get("kind"), "serve")
    axes = {name: size for name, size in plan["mesh"]["axes"].items() if size > 1}
    for axis, size in axes.items():
        if axis not in ENGINE_AXES:
            raise RooftopError(f"plan mesh axis {axis}", size, f"1: {engine_mesh_hint(axes)}")
    # The workload's own batch is null where the plan has searched for one.
    batch = int(plan["generate"]["batch"])
    planned = plan["dtypes"]
    group = None if planned["weights"] == "bf16" else planned["weight_group"]
    return Configuration(
        policy=Policy(max_batch=batch, chunk_tokens=batch + 512),
        mesh=tuple(axes.items()),
        kv_split=plan["kv_split"],
        weights=ENGINE_WEIGHTS.get((planned["weights"], group), "plain"),
        cache=ENGINE_CACHES.get(planned["kv"], "plain"),
    )
