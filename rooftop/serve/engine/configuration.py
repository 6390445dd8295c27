"""Configuration of an engine: its policy, its cache, and the shapes that its programs are compiled for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rooftop.arrays.rules import REPLICA_AXES, STAGE_AXES, ways
from rooftop.capabilities import ENGINE_AXES, ENGINE_CACHES, ENGINE_WEIGHTS, KV_SPLITS, KvSplit
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.rounding import ceil_div, next_multiple
from rooftop.models.program_sizes import PAGE_TOKENS
from rooftop.scheduling.serving.scheduler import ROLES, Policy
from rooftop.simulate.serving.measured import prefill_rows

#: Formats of weights: as the checkpoint has them, or one of ``rooftop.programs.serving.formats``.
WEIGHTS: tuple[str, ...] = tuple(ENGINE_WEIGHTS.values())
#: Formats of keys and values in the cache.
CACHES: tuple[str, ...] = tuple(ENGINE_CACHES.values())
DTYPES: tuple[str, ...] = ("float32", "bfloat16")
#: Tokens of a sequence whose block table is short enough to transfer in every step.
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
        cls, *, max_batch: int, max_model_len: int, page_tokens: int, prefill_tokens: int, reader: str, least: int = 1
    ) -> Shapes:
        """By default: batches double, widths and contexts quadruple. Batches and widths are multiples of ``least``.

        A ``reader`` of ``programs.serving.paged`` that reads only the pages in use gains nothing from short contexts
        but the transfer of shorter tables.
        """
        # Imported here: a configuration is checked before JAX is imported.
        from rooftop.programs.serving.paged import BLOCK

        pages = next_multiple(max_model_len, page_tokens)
        whole = BLOCK if reader == "gather" else _TABLE_TOKENS
        longest = max(16, min(prefill_tokens, max_model_len))
        first = 256 if reader == "gather" else _TABLE_TOKENS
        short = _grown(min(next_multiple(first, page_tokens), pages), min(whole, pages), 4)
        return cls(
            batches=tuple(sorted({next_multiple(size, least) for size in _grown(1, max_batch, 2)})),
            widths=tuple(_grown(next_multiple(16, least), next_multiple(longest, least), 4)),
            contexts=tuple(sorted({*(next_multiple(size, page_tokens) for size in short), pages})),
            prefill_tokens=prefill_tokens,
        )

    @property
    def prefills(self) -> list[tuple[int, int]]:
        """Rows and width of each prefill."""
        return sorted({(rows, width) for width in self.widths for rows in (1, max(1, self.prefill_tokens // width))})

    @property
    def mixed(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Rows and width of generation, and of the prefill in the same program: one piece, with the largest batch.

        Smaller batches would need programs of their own and gain less: both parts share one read of the weights.
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

    ``policy`` is the one that the simulator simulates. With 'disaggregated' batching the first ``prefill_devices``
    devices prefill and the others generate; in two processes, each does what its ``role`` says. A sequence has at most
    ``max_model_len`` tokens (None: as many as the model allows and the cache holds). The cache has ``pages`` of
    ``page_tokens`` (None: as many as fit) and ``host_pages`` in the host's memory. With ``prefix_cache``, prompts that
    begin alike share pages. At most ``max_queue`` requests wait. ``mesh``: sizes of ``ENGINE_AXES``; ``kv_split``:
    the dim of the cache that context splits. Each of the ``copies`` along data gets its share of ``max_batch``, and of
    a copy with pipeline ``stages`` each of as many flights: the sequences that take their steps together, while other
    stages work for other flights. A flight has caches of ``pages`` and ``host_pages`` of its own.
    ``compute_dtype`` has JAX's name (None: by platform). ``weights_dtype`` is that of all layers, or with
    ``only_experts`` that of their experts. A step guesses at most ``draft_length`` tokens and
    checks them together: it looks them up in the text (``rooftop.serve.engine.running``) or asks a draft model.
    """

    policy: Policy = field(default_factory=lambda: Policy(max_batch=32, chunk_tokens=256))
    page_tokens: int = PAGE_TOKENS
    pages: int | None = None
    host_pages: int = 0
    prefix_cache: bool = True
    max_model_len: int | None = None
    max_queue: int = 1024
    mesh: tuple[tuple[str, int], ...] = ()
    kv_split: KvSplit = "seq"
    prefill_devices: int = 0
    role: str = "both"
    compute_dtype: str | None = None
    weights_dtype: str = "plain"
    only_experts: bool = False
    kv_dtype: str = "plain"
    shapes: Shapes | None = None
    draft_length: int = 0

    @property
    def copies(self) -> int:
        """Replicas that prefill and generate, each with a cache of its own."""
        return ways(dict(self.mesh), *REPLICA_AXES)

    @property
    def stages(self) -> int:
        """Pipeline stages of a copy, and its flights."""
        return ways(dict(self.mesh), *STAGE_AXES)

    @property
    def own_policy(self) -> Policy:
        """Policy of one of the ``copies``, or of one of its flights."""
        return replace(self.policy, max_batch=ceil_div(self.policy.max_batch, self.copies * self.stages))

    def __post_init__(self) -> None:
        least_of = {"draft_length": 0, "page_tokens": 1, "host_pages": 0, "max_queue": 1, "prefill_devices": 0}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise RooftopError(name, getattr(self, name), f"a whole number of {least} or more")
        for name, known in (("weights_dtype", WEIGHTS), ("kv_dtype", CACHES), ("role", ROLES), ("kv_split", KV_SPLITS)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        if self.compute_dtype is not None and self.compute_dtype not in DTYPES:
            raise unknown("compute_dtype", self.compute_dtype, DTYPES)
        if self.policy.batching == "static":
            raise RooftopError("batching", "static", "interleaved or disaggregated: static batching is only simulated")
        if self.role != "both" and self.policy.batching != "disaggregated":
            raise RooftopError("batching", self.policy.batching, f"disaggregated, of which {self.role} is a part")
        for axis, _ in self.mesh:
            if axis not in ENGINE_AXES:
                raise unknown("mesh axis of an engine", axis, ENGINE_AXES)
        if self.copies > 1 and self.policy.batching == "disaggregated":
            raise RooftopError("mesh axis data", self.copies, "1 with disaggregated batching")
        if self.stages > 1 and self.role != "both":
            raise RooftopError("mesh axis stage", self.stages, f"1 in a process that can only {self.role}")


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
            near = [item["mesh"] for item in plan.get("nearest", ()) if item["slice"] == plan["slice"]["name"]]
            again = "".join(f"; plan with --mesh {','.join(f'{k}={n}' for k, n in mesh.items())}" for mesh in near[:1])
            accepted = f"1: an engine's axes are {', '.join(ENGINE_AXES)}{again}"
            raise RooftopError(f"plan mesh axis {axis}", size, accepted)
    # The workload's own batch is null if the plan searched for one.
    batch = int(plan["generate"]["batch"])
    planned = plan["dtypes"]
    group = None if planned["weights"] == "bf16" else planned["weight_group"]
    return Configuration(
        policy=Policy(max_batch=batch, chunk_tokens=batch + 512),
        mesh=tuple(axes.items()),
        kv_split=plan["kv_split"],
        weights_dtype=ENGINE_WEIGHTS.get((planned["weights"], group), "plain"),
        only_experts=planned["only_experts"],
        kv_dtype=ENGINE_CACHES.get(planned["kv"], "plain"),
    )
