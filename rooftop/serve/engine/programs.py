"""The programs that a replica runs, by kind and sizes: all are compiled before the first request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import Mesh, NamedSharding

from rooftop.core.errors import Infeasible
from rooftop.programs.parameters import Transformer
from rooftop.programs.serving.decode import HEAD, Decoder, choose_tokens, propose, step, through_stage
from rooftop.programs.serving.sampling import Adjustments
from rooftop.serve.engine.configuration import Shapes, covering

#: Kind and sizes of a program.
Key = tuple[Any, ...]
#: Rows of a program, new tokens of each, pages of their tables.
Shape = tuple[int, int, int]
#: A function, the arguments that it donates, and all its arguments.
_Traced = tuple[Any, tuple[int, ...], tuple[Any, ...]]
#: Pages that are copied at a time.
COPIED = 8
#: Programs compiled at a time: tracing is serial, XLA is not.
_COMPILERS = 4
#: Ratio of row counts that have a program that chooses tokens: such programs take long to compile.
_CHOICES = 4
#: Options that fill a CPU's cores: by default XLA prefers to save memory.
_CPU_OPTIONS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_CONCURRENCY_OPTIMIZED"}
#: XLA:GPU would make one matmul of the queries' and the keys', and concatenate their weights in every step for that:
#: a twelfth of a step of LLaMA-3 8B with 64 sequences, as compiled for an H100.
_GPU_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 0}


class Programs:
    """Of a ``rooftop.serve.engine.replica.Replica``, whose arguments these are.

    ``weights`` may be arrays or shapes. ``pools`` are the shapes of the cache's arrays, ``contents`` those of pages on
    their way, and ``whole`` says that all devices have the same.
    """

    def __init__(
        self,
        decoder: Decoder,
        mesh: Mesh,
        weights: Transformer[Any] | None,
        *,
        pages: int,
        slots: int,
        shapes: Shapes,
        draft_length: int = 0,
        drafts: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._decoder, self._mesh, self._shapes = decoder, mesh, shapes
        self._draft_length, self._drafts = draft_length, drafts
        platform = mesh.devices.flat[0].platform
        platform_options = (
            _CPU_OPTIONS if platform == "cpu" and mesh.size == 1 else _GPU_OPTIONS if platform == "gpu" else {}
        )
        self._options = {**platform_options, **(options or {})} or None
        #: Rows that are split over devices stand in blocks of theirs, and guesses are checked by other programs.
        self._mixes = decoder.groups.ways == 1 and not draft_length
        # Row counts that have a program that chooses tokens.
        self._choices = _apart(
            {*shapes.batches, *(rows for rows, _ in shapes.prefills)}
            | {rows * (1 + draft_length) for rows in shapes.batches}
        )
        self.whole = NamedSharding(mesh, P())
        leaves, self._weight_tree = jax.tree.flatten(weights)
        self._weights = _alike(leaves)
        self.pools, self._pool_tree = jax.tree.flatten(decoder.abstract_pools(pages, mesh))
        # Pages on their way are alike in all groups of devices.
        self.contents = [
            jax.ShapeDtypeStruct(
                (COPIED, *leaf.shape[1:]), leaf.dtype,
                sharding=NamedSharding(mesh, P(None, *leaf.sharding.spec.partitions[1:])),
            )
            for leaf in self.pools
        ]  # fmt: skip
        self._no_adjustments = partial(Adjustments.none, slots + 1, decoder.model.vocab)
        leaves, self._adjustment_tree = jax.tree.flatten(jax.eval_shape(self._no_adjustments))
        #: The last stage chooses tokens.
        self._adjustments = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.whole) for leaf in leaves if decoder.is_last
        ]
        self._compiled = dict[Key, jax.stages.Compiled]()

    def __getitem__(self, key: Key) -> jax.stages.Compiled:
        return self._compiled[key]

    def __contains__(self, key: Key) -> bool:
        return key in self._compiled

    def of_role(self, role: str) -> list[Key]:
        """Keys of the programs that steps of a server with this role may need."""
        keys: list[Key] = [("allocate",), ("take",), ("put",)]
        if self._decoder.is_last:
            keys += [("adjust",), ("mask",)]
        pages = [context // self._decoder.page_tokens for context in self._shapes.contexts]
        if not self._drafts and role != "prefill":
            keys += [("step", (rows, 1, width)) for rows in self._shapes.batches for width in pages]
        if role != "generate":
            keys += [("step", (*shape, width)) for shape in self._shapes.prefills for width in pages]
        if self._mixes and role == "both":
            keys += [("step", *((*shape, width) for shape in mix)) for mix in self._shapes.mixed for width in pages]
        if self._draft_length and role != "prefill":
            kind = ("propose", 1) if self._drafts else ("check", 1 + self._draft_length)
            keys += [(kind[0], (rows, kind[1], width)) for rows in self._shapes.batches for width in pages]
        if self._decoder.is_last and not self._drafts:
            keys += [("choose", rows) for rows in self._choices]
        return keys

    def compile(self, keys: Iterable[Key], on_progress: Callable[[int, int], None] | None = None) -> int:
        """Compile the programs of ``keys`` that are missing, and return how many those are.

        Raises Infeasible if the process cannot have so many.
        """
        missing = [key for key in keys if key not in self._compiled]
        with ThreadPoolExecutor(_COMPILERS) as compilers:
            for done, (key, program) in enumerate(zip(missing, compilers.map(self._program, missing), strict=True)):
                self._compiled[key] = program
                if on_progress is not None:
                    on_progress(1 + done, len(missing))
        return len(missing)

    def _program(self, key: Key) -> jax.stages.Compiled:
        kind, *sizes = key
        function: Callable[..., _Traced] = getattr(self, f"_{kind}_program")
        require_mappings()
        with jax.set_mesh(self._mesh):
            traced, donated, arguments = function(*sizes)
            lowered = jax.jit(traced, donate_argnums=donated).lower(*arguments)
            return lowered.compile(compiler_options=self._options)

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.whole)

    def _check_program(self, shape: Shape) -> _Traced:
        return self._step_program(shape, every=True)

    def stream(self, tokens: int) -> jax.ShapeDtypeStruct:
        """The residual stream that comes from the stage before."""
        return self._decoder.abstract_stream(tokens, self._mesh)

    def _step_program(self, *shapes: Shape, every: bool = False) -> _Traced:
        def run(weights: Any, pools: Any, packed: list[jax.Array], *streams: jax.Array) -> Any:
            trees = jax.tree.unflatten(self._weight_tree, weights), jax.tree.unflatten(self._pool_tree, pools)
            widths, stream = [width for _, width, _ in shapes], streams[0] if streams else None
            if not self._decoder.is_last:
                after, pools = through_stage(*trees, packed, self._decoder, widths=widths, stream=stream)
                return after, jax.tree.leaves(pools)
            tokens, logits, pools = step(*trees, packed, self._decoder, widths=widths, every=every, stream=stream)
            apart = np.cumsum([len(item) for item in packed])[:-1]
            return (
                jnp.split(tokens, apart),
                [self._with_room(item) for item in jnp.split(logits, apart)],
                jax.tree.leaves(pools),
            )

        packed = [self._ints(rows, HEAD + width + pages) for rows, width, pages in shapes]
        streams = () if self._decoder.is_first else (self.stream(sum(rows * width for rows, width, _ in shapes)),)
        return run, (1,), (self._weights, self.pools, packed, *streams)

    def choice_rows(self, rows: int) -> int:
        """Rows of the program that chooses tokens for so many."""
        return covering(self._choices, rows)

    def _with_room(self, logits: jax.Array) -> jax.Array:
        """As the program that chooses from them takes them."""
        more = 0 if self._drafts else self.choice_rows(len(logits)) - len(logits)
        return jnp.pad(logits, ((0, more), (0, 0)))

    def _choose_program(self, rows: int) -> _Traced:
        def run(logits: jax.Array, adjustments: Any, heads: jax.Array) -> Any:
            adjusted = jax.tree.unflatten(self._adjustment_tree, adjustments)
            chosen, adjusted = choose_tokens(logits, adjusted, heads, self._decoder)
            return (chosen.tokens, chosen.logprobs, chosen.top, chosen.top_ids), jax.tree.leaves(adjusted)

        split = NamedSharding(self._mesh, self._decoder.logits_spec)
        logits = jax.ShapeDtypeStruct((rows, self._decoder.logits_stored), jnp.float32, sharding=split)
        return run, (1,), (logits, self._adjustments, self._ints(rows, HEAD))

    def _propose_program(self, shape: Shape) -> _Traced:
        rows, width, pages = shape

        def run(weights: Any, pools: Any, packed: jax.Array) -> Any:
            guesses, pools = propose(
                jax.tree.unflatten(self._weight_tree, weights),
                jax.tree.unflatten(self._pool_tree, pools),
                packed,
                self._decoder,
                most=self._draft_length,
            )
            return guesses, jax.tree.leaves(pools)

        return run, (1,), (self._weights, self.pools, self._ints(rows, HEAD + width + pages))

    def _allocate_program(self) -> _Traced:
        def empty() -> tuple[list[jax.Array], list[jax.Array]]:
            pools = [jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding) for x in self.pools]
            adjustments = jax.tree.leaves(self._no_adjustments()) if self._adjustments else []
            return pools, [jax.sharding.reshard(x, P()) for x in adjustments]

        return empty, (), ()

    def _take_program(self) -> _Traced:
        groups = self._decoder.groups

        def take(pools: list[jax.Array], pages: jax.Array) -> list[jax.Array]:
            return [groups.take(pool, pages, jax.typeof(pool).sharding.spec) for pool in pools]

        return take, (), (self.pools, self._ints(COPIED))

    def _put_program(self) -> _Traced:
        groups = self._decoder.groups

        def put(pools: list[jax.Array], pages: jax.Array, contents: list[jax.Array]) -> list[jax.Array]:
            return [
                groups.put(pool, pages, item, jax.typeof(pool).sharding.spec)
                for pool, item in zip(pools, contents, strict=True)
            ]

        return put, (0,), (self.pools, self._ints(COPIED), self.contents)

    def _adjust_program(self) -> _Traced:
        def adjust(adjustments: list[jax.Array], slot: jax.Array, *rows: jax.Array) -> list[jax.Array]:
            return [adjustment.at[slot].set(row) for adjustment, row in zip(adjustments, rows, strict=True)]

        rows = [
            jax.ShapeDtypeStruct(adjustment.shape[1:], adjustment.dtype, sharding=self.whole)
            for adjustment in self._adjustments
        ]
        return adjust, (0,), (self._adjustments, self._ints(), *rows)

    def _mask_program(self) -> _Traced:
        def put(adjustments: list[jax.Array], slot: jax.Array, mask: jax.Array) -> list[jax.Array]:
            bias, seen, masks, penalties = adjustments
            return [bias, seen, masks.at[slot].set(mask), penalties]

        masks = self._adjustments[2]
        mask = jax.ShapeDtypeStruct(masks.shape[1:], masks.dtype, sharding=self.whole)
        return put, (0,), (self._adjustments, self._ints(), mask)

    def _gather_program(self) -> _Traced:
        take, donated, arguments = self._take_program()

        def gather(pools: list[jax.Array], pages: jax.Array) -> list[jax.Array]:
            return [jax.sharding.reshard(item, P()) for item in take(pools, pages)]

        return gather, donated, arguments


def _alike(arrays: Iterable[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding) for array in arrays]


def _apart(sizes: set[int]) -> list[int]:
    """The largest of ``sizes``, and each further one that is ``_CHOICES`` times smaller than the last chosen."""
    apart = list[int]()
    for size in sorted(sizes, reverse=True):
        if not apart or size * _CHOICES <= apart[0]:
            apart.insert(0, size)
    return apart


class Compilations:
    """Counts compilations of one thread, from ``watch`` to ``stop``."""

    def __init__(self) -> None:
        self.count = 0
        self._thread: int | None = None

    def watch(self) -> None:
        """Count what this thread compiles from now on."""
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def stop(self) -> None:
        """Stop counting."""
        if self._thread is not None:
            jax.monitoring.unregister_event_duration_listener(self._heard)
            self._thread = None

    def _heard(self, event: str, duration_secs: float, **facts: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and threading.get_ident() == self._thread:
            self.count += 1


#: Limit of memory mappings of a process on Linux, and the list of this process's mappings.
MOST, OWN = Path("/proc/sys/vm/max_map_count"), Path("/proc/self/maps")
#: Share of the limit beyond which nothing is compiled: a process without mappings left crashes.
_SHARE = 0.9


def require_mappings() -> None:
    """Raises Infeasible if this process is near the limit of memory mappings."""
    try:
        most = int(MOST.read_text())
        with OWN.open("rb") as lines:
            mappings = sum(1 for _ in lines)
    except (OSError, ValueError):
        return
    if mappings > _SHARE * most:
        raise Infeasible(
            f"{mappings:,} mappings of memory for compiled programs",
            f"nearly the {most:,} that Linux lets a process have; ask for fewer copies or shorter contexts, or raise "
            "vm.max_map_count (sysctl)",
        )
