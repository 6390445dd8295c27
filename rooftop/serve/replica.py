"""The device side of an engine: weights, pools and the programs that run over them, all compiled before they serve."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import P
from jax.sharding import Mesh, NamedSharding

from rooftop.programs.decode import (
    HEAD,
    SLOT,
    Chosen,
    Decoder,
    choose_tokens,
    heads_of_each,
    only_likeliest,
    propose,
    step,
)
from rooftop.programs.parameters import Transformer
from rooftop.programs.sampling import Adjustments
from rooftop.scheduling.serving_prefixes import Copy
from rooftop.serve.configuration import Shapes, covering
from rooftop.serve.host_pages import Content, HostPages, placed

Ints = npt.NDArray[np.int32]
#: Rows of a program, new tokens of each, pages of their tables.
_Shape = tuple[int, int, int]
#: A function, which arguments it donates, and what they are.
_Traced = tuple[Any, tuple[int, ...], tuple[Any, ...]]
#: Pages that are copied at a time.
COPIED = 8
#: Programs that are compiled at a time: tracing takes turns, XLA does not.
_COMPILERS = 4
#: How far the numbers of rows lie apart for which there is a program that chooses tokens: it takes long to compile.
_CHOICES = 4
#: What fills a CPU's cores: much of a step has no need of all of them, and by default XLA saves memory first.
_CPU_OPTIONS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_CONCURRENCY_OPTIMIZED"}


@dataclass(frozen=True, kw_only=True)
class Adjusted:
    """What changes the logits of one request, in full: see ``rooftop.programs.sampling.Adjustments``."""

    bias: npt.NDArray[np.float32]
    seen: Ints
    mask: npt.NDArray[np.uint32]
    penalties: npt.NDArray[np.float32]


class Replica:
    """A model on a mesh with its cache. Used by one thread.

    ``weights`` are as ``rooftop.programs.decode`` takes them. ``options`` go to the compiler. It checks ``guesses`` of
    each sequence at a time, or if it ``drafts`` makes them.
    """

    def __init__(
        self,
        decoder: Decoder,
        mesh: Mesh,
        weights: Transformer[Any],
        *,
        pages: int,
        host_pages: int,
        slots: int,
        shapes: Shapes,
        guesses: int = 0,
        drafts: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.decoder, self.mesh, self.shapes, self.pages, self.slots = decoder, mesh, shapes, pages, slots
        self.guesses, self.drafts = guesses, drafts
        cpu = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
        self._options = {**(_CPU_OPTIONS if cpu else {}), **(options or {})} or None
        #: Rows that are split over devices stand in blocks of theirs, and guesses are checked by other programs.
        self._mixes = decoder.groups.ways == 1 and not guesses
        self._choices = _apart(
            {*shapes.batches, *(rows for rows, _ in shapes.prefills)}
            | {rows * (1 + guesses) for rows in shapes.batches}
        )
        self._whole = NamedSharding(mesh, P())
        self._weights, self._weight_tree = jax.tree.flatten(weights)
        abstract = decoder.abstract_pools(pages, mesh)
        self._abstract_pools, self._pool_tree = jax.tree.flatten(abstract)
        # Pages on their way are alike in all groups of devices.
        self._abstract_contents = [
            jax.ShapeDtypeStruct(
                (COPIED, *leaf.shape[1:]), leaf.dtype,
                sharding=NamedSharding(mesh, P(None, *leaf.sharding.spec.partitions[1:])),
            )
            for leaf in self._abstract_pools
        ]  # fmt: skip
        self._no_adjustments = partial(Adjustments.none, slots + 1, decoder.model.vocab)
        leaves, self._adjustment_tree = jax.tree.flatten(jax.eval_shape(self._no_adjustments))
        self._abstract_adjustments = [
            jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=self._whole) for each in leaves
        ]
        self._pools = list[jax.Array]()
        self._host = HostPages(self._abstract_contents, host_pages)
        self._adjustments = list[jax.Array]()
        self._programs = dict[tuple[Any, ...], Callable[..., Any]]()
        #: Emulated devices share threads: one program at a time (see JAX's notes on CPU collectives).
        self._one_at_a_time = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    def allocate(self) -> None:
        """Empty pools, and adjustments that change nothing."""
        self._pools, self._adjustments = self._programs["allocate",]()

    @property
    def pool_leaves(self) -> Sequence[jax.ShapeDtypeStruct]:
        """The arrays of the cache: [pages, ...] each."""
        return self._abstract_pools

    def compile(self, on_progress: Callable[[int, int], None] | None = None, *, role: str = "both") -> int:
        """Every program that a step of a server with that role can need; returns how many."""
        wanted: list[tuple[Any, ...]] = [("allocate",), ("take",), ("put",), ("adjust",), ("mask",)]
        pages = [context // self.decoder.page_tokens for context in self.shapes.contexts]
        if not self.drafts and role != "prefill":
            wanted += [("step", (rows, 1, width)) for rows in self.shapes.batches for width in pages]
        if role != "generate":
            wanted += [("step", (*shape, width)) for shape in self.shapes.prefills for width in pages]
        if self._mixes and role == "both":
            wanted += [("step", *((*shape, width) for shape in mix)) for mix in self.shapes.mixed for width in pages]
        if self.guesses and role != "prefill":
            kind = ("propose", 1) if self.drafts else ("check", 1 + self.guesses)
            wanted += [(kind[0], (rows, kind[1], width)) for rows in self.shapes.batches for width in pages]
        if not self.drafts:
            wanted += [("choose", rows) for rows in self._choices]
        missing = [key for key in wanted if key not in self._programs]
        with ThreadPoolExecutor(_COMPILERS) as compilers:
            for done, (key, program) in enumerate(zip(missing, compilers.map(self._program, missing), strict=True)):
                self._programs[key] = program
                if on_progress is not None:
                    on_progress(1 + done, len(missing))
        self.allocate()
        return len(wanted)

    def step(self, *parts: tuple[Ints, int], every: bool = False) -> list[Chosen]:
        """Run ``rooftop.programs.decode.step``, each part a packed [R, HEAD + C + P] and its C; see ``can_mix``.

        And ``choose_tokens`` for parts with a row that wants that; what a draft chooses after a prompt is never used.
        """
        program = self._programs["check" if every else "step", *(_shape(*each) for each in parts)]
        tokens, logits, self._pools = program(self._weights, self._pools, [self._given(each) for each, _ in parts])
        if self._one_at_a_time:
            jax.block_until_ready(logits)
        heads = [heads_of_each(*each) if every else each[0][:, :HEAD] for each in parts]
        return [
            Chosen(tokens=likeliest) if self.drafts or only_likeliest(asked) else self._chosen(each, asked)
            for likeliest, each, asked in zip(tokens, logits, heads, strict=True)
        ]

    def _chosen(self, logits: jax.Array, asked: Ints) -> Chosen:
        heads = np.zeros((len(logits), HEAD), np.int32)
        heads[:, SLOT] = self.slots
        heads[: len(asked)] = asked
        program = self._programs["choose", len(heads)]
        chosen, self._adjustments = program(logits, self._adjustments, self._given(heads))
        if self._one_at_a_time:
            jax.block_until_ready(chosen)
        return Chosen(tokens=chosen[0], logprobs=chosen[1], top=chosen[2], top_ids=chosen[3])

    def can_mix(self, *parts: tuple[Ints, int]) -> bool:
        """Whether one program takes these parts together."""
        return ("step", *(_shape(*each) for each in parts)) in self._programs

    def propose(self, packed: Ints) -> Ints:
        """Run ``rooftop.programs.decode.propose`` for ``packed`` [R, HEAD + 1 + P]: guesses [R, ``guesses``]."""
        program = self._programs["propose", _shape(packed, 1)]
        found, self._pools = program(self._weights, self._pools, self._put(packed))
        if self._one_at_a_time:
            jax.block_until_ready(self._pools)
        return np.asarray(found)

    def copy(self, copies: Iterable[Copy]) -> None:
        """Pages to the host's memory and back, in order."""
        for each in copies:
            source, target = np.array(each.source, np.int32), np.array(each.target, np.int32)
            for first in range(0, len(source), COPIED):
                out, into = source[first : first + COPIED], target[first : first + COPIED]
                if each.to_host:
                    self._host.keep(into, self._taken(out))
                else:
                    self._fill(into, self._host.contents(self._padded(out, 0)))

    def take(self, pages: Ints) -> Sequence[jax.Array]:
        """The contents of at most ``COPIED`` pages, of each pool array [COPIED, ...]."""
        return self._taken(pages)

    def put(self, pages: Ints, contents: Sequence[Content]) -> None:
        """The reverse, from arrays of the host or of another replica with such pools."""
        self._fill(pages, contents)

    def _taken(self, pages: Ints) -> Sequence[jax.Array]:
        found: Sequence[jax.Array] = self._programs["take",](self._pools, self._put(self._padded(pages, self.pages)))
        return jax.block_until_ready(found) if self._one_at_a_time else found

    def _fill(self, pages: Ints, contents: Sequence[Content]) -> None:
        moved = placed(contents, self._abstract_contents)
        self._pools = self._programs["put",](self._pools, self._put(self._padded(pages, self.pages)), moved)
        if self._one_at_a_time:
            jax.block_until_ready(self._pools)

    def adjust(self, slot: int, how: Adjusted) -> None:
        """What changes the logits of the request in ``slot`` from now on."""
        arrays = [self._put(each) for each in (np.int32(slot), how.bias, how.seen, how.mask, how.penalties)]
        self._adjustments = self._programs["adjust",](self._adjustments, *arrays)

    def set_mask(self, slot: int, mask: npt.NDArray[np.uint32]) -> None:
        """The tokens that the request in ``slot`` may choose from next."""
        self._adjustments = self._programs["mask",](self._adjustments, self._put(np.int32(slot)), self._put(mask))

    def _given(self, array: Ints) -> Any:
        """An argument that nobody else has: programs of one process take it as it is, which is faster."""
        return array if self._whole.is_fully_addressable else self._put(array)

    def _put(self, array: Any) -> jax.Array:
        if self._whole.is_fully_addressable:
            placed: jax.Array = jax.device_put(array, self._whole)
            return placed
        # ``device_put`` would have all processes compare what they have, each time.
        given = np.asarray(array)
        return jax.make_array_from_callback(given.shape, self._whole, lambda index: given[index])

    def _padded(self, pages: Ints, with_: int) -> Ints:
        return np.concatenate([pages, np.full(COPIED - len(pages), with_, np.int32)])

    def _program(self, key: tuple[Any, ...]) -> Callable[..., Any]:
        kind, *sizes = key
        function: Callable[..., Any] = getattr(self, f"_{kind}_program")
        with jax.set_mesh(self.mesh):
            traced, donated, arguments = function(*sizes)
            compiled: Callable[..., Any] = (
                jax.jit(traced, donate_argnums=donated).lower(*arguments).compile(compiler_options=self._options)
            )
        return compiled

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._whole)

    @staticmethod
    def _alike(arrays: Iterable[jax.Array]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding) for each in arrays]

    def _check_program(self, shape: _Shape) -> _Traced:
        return self._step_program(shape, every=True)

    def _step_program(self, *shapes: _Shape, every: bool = False) -> _Traced:
        def run(weights: Any, pools: Any, packed: list[jax.Array]) -> Any:
            tokens, logits, pools = step(
                jax.tree.unflatten(self._weight_tree, weights),
                jax.tree.unflatten(self._pool_tree, pools),
                packed,
                self.decoder,
                widths=[width for _, width, _ in shapes],
                every=every,
            )
            apart = np.cumsum([len(each) for each in packed])[:-1]
            return (
                jnp.split(tokens, apart),
                [self._with_room(each) for each in jnp.split(logits, apart)],
                jax.tree.leaves(pools),
            )

        packed = [self._ints(rows, HEAD + width + pages) for rows, width, pages in shapes]
        return run, (1,), (self._alike(self._weights), self._abstract_pools, packed)

    def _with_room(self, logits: jax.Array) -> jax.Array:
        """As the program that chooses from them takes them."""
        more = 0 if self.drafts else covering(self._choices, len(logits)) - len(logits)
        return jnp.pad(logits, ((0, more), (0, 0)))

    def _choose_program(self, rows: int) -> _Traced:
        def run(logits: jax.Array, adjustments: Any, heads: jax.Array) -> Any:
            adjusted = jax.tree.unflatten(self._adjustment_tree, adjustments)
            chosen, adjusted = choose_tokens(logits, adjusted, heads, self.decoder)
            return (chosen.tokens, chosen.logprobs, chosen.top, chosen.top_ids), jax.tree.leaves(adjusted)

        logits = jax.ShapeDtypeStruct((rows, self.decoder.model.vocab), jnp.float32, sharding=self._whole)
        return run, (1,), (logits, self._abstract_adjustments, self._ints(rows, HEAD))

    def _propose_program(self, shape: _Shape) -> _Traced:
        rows, width, pages = shape

        def run(weights: Any, pools: Any, packed: jax.Array) -> Any:
            guesses, pools = propose(
                jax.tree.unflatten(self._weight_tree, weights),
                jax.tree.unflatten(self._pool_tree, pools),
                packed,
                self.decoder,
                most=self.guesses,
            )
            return guesses, jax.tree.leaves(pools)

        return run, (1,), (self._alike(self._weights), self._abstract_pools, self._ints(rows, HEAD + width + pages))

    def _allocate_program(self) -> _Traced:
        def empty() -> tuple[list[jax.Array], list[jax.Array]]:
            pools = [jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding) for x in self._abstract_pools]
            return pools, [jax.sharding.reshard(x, P()) for x in jax.tree.leaves(self._no_adjustments())]

        return empty, (), ()

    def _take_program(self) -> _Traced:
        groups = self.decoder.groups

        def take(pools: list[jax.Array], pages: jax.Array) -> list[jax.Array]:
            return [groups.take(pool, pages, jax.typeof(pool).sharding.spec) for pool in pools]

        return take, (), (self._abstract_pools, self._ints(COPIED))

    def _put_program(self) -> _Traced:
        groups = self.decoder.groups

        def put(pools: list[jax.Array], pages: jax.Array, contents: list[jax.Array]) -> list[jax.Array]:
            return [
                groups.put(pool, pages, each, jax.typeof(pool).sharding.spec)
                for pool, each in zip(pools, contents, strict=True)
            ]

        return put, (0,), (self._abstract_pools, self._ints(COPIED), self._abstract_contents)

    def _adjust_program(self) -> _Traced:
        def adjust(adjustments: list[jax.Array], slot: jax.Array, *rows: jax.Array) -> list[jax.Array]:
            return [each.at[slot].set(row) for each, row in zip(adjustments, rows, strict=True)]

        rows = [
            jax.ShapeDtypeStruct(each.shape[1:], each.dtype, sharding=self._whole)
            for each in self._abstract_adjustments
        ]
        return adjust, (0,), (self._abstract_adjustments, self._ints(), *rows)

    def _mask_program(self) -> _Traced:
        def put(adjustments: list[jax.Array], slot: jax.Array, mask: jax.Array) -> list[jax.Array]:
            bias, seen, masks, penalties = adjustments
            return [bias, seen, masks.at[slot].set(mask), penalties]

        masks = self._abstract_adjustments[2]
        mask = jax.ShapeDtypeStruct(masks.shape[1:], masks.dtype, sharding=self._whole)
        return put, (0,), (self._abstract_adjustments, self._ints(), mask)


def _apart(sizes: set[int]) -> list[int]:
    """The largest of ``sizes``, and of the others each that is ``_CHOICES`` times smaller than the one above it."""
    found = list[int]()
    for size in sorted(sizes, reverse=True):
        if not found or size * _CHOICES <= found[0]:
            found.insert(0, size)
    return found


def _shape(packed: Ints, width: int) -> _Shape:
    rows, columns = packed.shape
    return rows, width, columns - HEAD - width


class Compilations:
    """Counts what XLA compiles in one thread, from when it is watched."""

    def __init__(self) -> None:
        self.count = 0
        self._thread: int | None = None

    def watch(self) -> None:
        """Count what this thread compiles from now on."""
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def stop(self) -> None:
        """Count no more."""
        if self._thread is not None:
            jax.monitoring.unregister_event_duration_listener(self._heard)
            self._thread = None

    def _heard(self, event: str, duration_secs: float, **facts: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and threading.get_ident() == self._thread:
            self.count += 1
