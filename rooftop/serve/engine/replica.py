"""The device side of an engine: weights, pools and the programs that run over them, all compiled before they serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding

from rooftop.compiler.collectives.waits import axes_over_processes, waiting_line
from rooftop.programs.parameters import Transformer
from rooftop.programs.serving.decode import HEAD, SLOT, Chosen, Decoder, heads_of_each, only_likeliest
from rooftop.scheduling.serving.prefixes import Copy
from rooftop.serve.engine.configuration import Shapes
from rooftop.serve.engine.programs import COPIED, Key, Programs, Shape
from rooftop.serve.engine.stages import HandOver

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Adjusted:
    """Adjustments to the logits of one request, in full: see ``rooftop.programs.serving.sampling.Adjustments``."""

    bias: npt.NDArray[np.float32]
    seen: Ints
    mask: npt.NDArray[np.uint32]
    penalties: npt.NDArray[np.float32]


class Replica:
    """A model on a mesh with its cache. Used by one thread.

    ``weights`` are as ``programs.serving.decode`` takes them. ``options`` go to the compiler. It checks
    ``draft_length`` guesses of each sequence at a time, or makes them if it ``drafts``.

    The first of several pipeline stages is the replica; ``after`` is the next stage, on a mesh of its own. Programs of
    different stages run at the same time for different steps: XLA's queues keep the order of the steps. Of several
    processes, each runs the programs of the stages of which it has devices; the others have no ``weights`` of them.
    """

    def __init__(
        self,
        decoder: Decoder,
        mesh: Mesh,
        weights: Transformer[Any] | None,
        *,
        pages: int,
        host_pages: int,
        slots: int,
        shapes: Shapes,
        draft_length: int = 0,
        drafts: bool = False,
        options: dict[str, Any] | None = None,
        after: Replica | None = None,
    ) -> None:
        self.decoder, self.shapes, self.pages, self.slots = decoder, shapes, pages, slots
        self.after, self.mesh = after, mesh
        #: True if this process has devices of the stage.
        self._here = bool(mesh.local_devices)
        self._onward = None if after is None else HandOver(mesh, after.mesh)
        self._back = None if after is None or not decoder.is_first else HandOver(after._last.mesh, mesh)
        self.draft_length, self.drafts = draft_length, drafts
        self._programs = Programs(
            decoder,
            mesh,
            weights,
            pages=pages,
            slots=slots,
            shapes=shapes,
            draft_length=draft_length,
            drafts=drafts,
            options=options,
        )
        self._weights = jax.tree.leaves(weights)
        self._pools, self._adjustments = list[jax.Array](), list[jax.Array]()
        #: The program of the last step.
        self._begun: Key | None = None
        self._host_pages = host_pages
        self._host = HostPages(self._programs.contents, host_pages)
        #: Emulated devices share threads: one program at a time (see JAX's notes on CPU collectives).
        self._one_at_a_time = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    def beside(self) -> Replica:
        """Another replica of the same weights and programs, with a cache of its own, which is not allocated yet."""
        other = copy(self)
        other._pools, other._adjustments = [], []
        other._host = HostPages(self._programs.contents, self._host_pages)
        other.after = None if self.after is None else self.after.beside()
        return other

    def allocate(self) -> None:
        """Empty pools, and adjustments that change nothing."""
        if self._here:
            self._pools, self._adjustments = self._programs["allocate",]()
        if self.after is not None:
            self.after.allocate()

    @property
    def pool_leaves(self) -> Sequence[jax.ShapeDtypeStruct]:
        """The arrays of the cache, of all stages: [pages, ...] each."""
        return self._programs.pools if self.after is None else [*self._programs.pools, *self.after.pool_leaves]

    def compile(self, on_progress: Callable[[int, int], None] | None = None, *, role: str = "both") -> int:
        """Every program that a step of a server with that role can need; returns how many were missing.

        Raises Infeasible.
        """
        compiled = self._compile(on_progress, role)
        self.allocate()
        return compiled

    def _compile(self, on_progress: Callable[[int, int], None] | None, role: str) -> int:
        keys = self._program_keys(role)
        compiled = self._programs.compile(keys, on_progress) if self._here else 0
        for kind, *shapes in keys:
            if self._onward is not None and self.after is not None and kind in ("step", "check"):
                tokens = sum(rows * width for rows, width, _ in shapes)
                compiled += self._onward.compile(self.after._programs.stream(tokens))
        if self._back is not None:
            # What the last stage yields: see ``step``.
            for kind, *shapes in self._last._program_keys(role):
                several = 1 if kind == "step" else 1 + self.draft_length
                rows = [rows * several for rows, _, _ in shapes] if kind in ("step", "check") else []
                likes = [like for count in rows for like in self._choice(count)[:1]]
                likes += self._choice(shapes[0]) if kind == "choose" else []
                compiled += sum(map(self._back.compile, likes))
        return compiled if self.after is None else compiled + self.after._compile(on_progress, role)

    def _choice(self, rows: int) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the fields of ``Chosen``, on all devices of this stage."""
        most = min(self.decoder.alternatives, self.decoder.model.vocab)
        kinds = [((rows,), jnp.int32), ((rows,), jnp.float32), ((rows, most), jnp.float32), ((rows, most), jnp.int32)]
        return [jax.ShapeDtypeStruct(shape, dtype, sharding=self._programs.whole) for shape, dtype in kinds]

    @property
    def _last(self) -> Replica:
        """The last stage."""
        return self if self.after is None else self.after._last

    def _program_keys(self, role: str) -> list[Key]:
        return self._programs.of_role(role)

    def step(self, *parts: tuple[Ints, int], every: bool = False, stream: jax.Array | None = None) -> list[Chosen]:
        """Run ``programs.serving.decode.step``, each part a packed [R, HEAD + C + P] and its C; see ``can_mix``.

        And ``choose_tokens`` for parts with a row that wants that; what a draft chooses after a prompt is never used.
        ``stream`` comes from the stage before.
        """
        key = "check" if every else "step", *(_shape(*part) for part in parts)
        self._begun = key
        outputs: Any = None
        if self._here:
            packed = [self._argument(part) for part, _ in parts]
            streams = [] if stream is None else [stream]
            *outputs, self._pools = self._programs[key](self._weights, self._pools, packed, *streams)
            if self._one_at_a_time:
                jax.block_until_ready(outputs)
        if self.after is not None and self._onward is not None:
            like = self.after._programs.stream(sum(len(part) * width for part, width in parts))
            handed = self._onward(outputs[0] if self._here else None, like)
            chosen = self.after.step(*parts, every=every, stream=handed)
            if self._back is None or jax.process_count() == 1:
                return chosen
            return self._returned(self._back, parts, every, chosen)
        if not self._here:
            return []
        tokens, logits = outputs
        return [
            Chosen(tokens=likeliest) if self._is_plain(asked) else self._chosen(token, asked)
            for likeliest, token, asked in zip(tokens, logits, _heads(parts, every), strict=True)
        ]

    def waits(self) -> str:
        """The collectives in which the program of the last step can wait, in a line; empty if it has none."""
        across = axes_over_processes(self.mesh) if self._here and self._begun is not None else ()
        if not across or self._begun is None:
            return ""
        return waiting_line(self._programs[self._begun].as_text() or "", dict(self.mesh.shape), across)

    def _is_plain(self, asked: Ints) -> bool:
        """True if the likeliest token of each row is all that is asked for."""
        return self.drafts or only_likeliest(asked)

    def _returned(
        self, back: HandOver, parts: Sequence[tuple[Ints, int]], every: bool, chosen: Sequence[Chosen]
    ) -> list[Chosen]:
        """The tokens that the last stage has ``chosen``, on the devices of this one, whose first process reads them."""
        returned = list[Chosen]()
        for at, asked in enumerate(_heads(parts, every)):
            plain = self._is_plain(asked)
            likes = self._choice(len(asked) if plain else self._programs.choice_rows(len(asked)))
            names = ("tokens", "logprobs", "top", "top_ids")[: 1 if plain else None]
            arrays: dict[str, Any] = {
                name: back(getattr(chosen[at], name) if chosen else None, like)
                for name, like in zip(names, likes, strict=False)
            }
            if self._here:
                returned.append(Chosen(**arrays))
        return returned

    def _chosen(self, logits: jax.Array, asked: Ints) -> Chosen:
        heads = np.zeros((len(logits), HEAD), np.int32)
        heads[:, SLOT] = self.slots
        heads[: len(asked)] = asked
        program = self._programs["choose", len(heads)]
        chosen, self._adjustments = program(logits, self._adjustments, self._argument(heads))
        if self._one_at_a_time:
            jax.block_until_ready(chosen)
        return Chosen(tokens=chosen[0], logprobs=chosen[1], top=chosen[2], top_ids=chosen[3])

    def can_mix(self, *parts: tuple[Ints, int]) -> bool:
        """Return True if there is a program for these parts together."""
        return ("step", *(_shape(*part) for part in parts)) in self._programs

    def propose(self, packed: Ints) -> Ints:
        """Run ``programs.serving.decode.propose`` for ``packed`` [R, HEAD + 1 + P]: guesses [R, ``draft_length``]."""
        program = self._programs["propose", _shape(packed, 1)]
        result, self._pools = program(self._weights, self._pools, self._put(packed))
        if self._one_at_a_time:
            jax.block_until_ready(self._pools)
        return np.asarray(result)

    def copy(self, copies: Iterable[Copy]) -> None:
        """Pages to the host's memory and back, in order."""
        every = list(copies)
        for item in every if self._here else ():
            source, target = np.array(item.source, np.int32), np.array(item.target, np.int32)
            for first in range(0, len(source), COPIED):
                out, into = source[first : first + COPIED], target[first : first + COPIED]
                if item.to_host:
                    self._host.keep(into, self._read_pages(out))
                else:
                    self._fill(into, self._host.contents(self._padded(out, 0)))
        if self.after is not None:
            self.after.copy(every)

    def take(self, pages: Ints) -> Sequence[jax.Array]:
        """The contents of at most ``COPIED`` pages, of each of ``pool_leaves`` [COPIED, ...]."""
        absent: list[Any] = [None] * len(self._programs.pools)
        taken = self._read_pages(pages) if self._here else absent
        return taken if self.after is None else [*taken, *self.after.take(pages)]

    def put(self, pages: Ints, contents: Sequence[Content]) -> None:
        """Write pages from arrays of the host, or of another replica with the same pools."""
        pools = len(self._programs.pools)
        if self._here:
            self._fill(pages, contents[:pools])
        if self.after is not None:
            self.after.put(pages, contents[pools:])

    def _read_pages(self, pages: Ints) -> Sequence[jax.Array]:
        result: Sequence[jax.Array] = self._programs["take",](self._pools, self._put(self._padded(pages, self.pages)))
        return jax.block_until_ready(result) if self._one_at_a_time else result

    def _fill(self, pages: Ints, contents: Sequence[Content]) -> None:
        moved = placed(contents, self._programs.contents)
        self._pools = self._programs["put",](self._pools, self._put(self._padded(pages, self.pages)), moved)
        if self._one_at_a_time:
            jax.block_until_ready(self._pools)

    def adjust(self, slot: int, adjusted: Adjusted) -> None:
        """Set the adjustments to the logits of the request in ``slot``."""
        if self.after is not None:
            self.after.adjust(slot, adjusted)
            return
        if not self._here:
            return
        arrays = [
            self._put(item)
            for item in (np.int32(slot), adjusted.bias, adjusted.seen, adjusted.mask, adjusted.penalties)
        ]
        self._adjustments = self._programs["adjust",](self._adjustments, *arrays)

    def set_mask(self, slot: int, mask: npt.NDArray[np.uint32]) -> None:
        """The tokens that the request in ``slot`` may choose from next."""
        if self.after is not None:
            self.after.set_mask(slot, mask)
            return
        if not self._here:
            return
        self._adjustments = self._programs["mask",](self._adjustments, self._put(np.int32(slot)), self._put(mask))

    def _argument(self, array: Ints) -> Any:
        """A program argument of this process alone: as a NumPy array, which is faster to pass."""
        return array if self._programs.whole.is_fully_addressable else self._put(array)

    def _put(self, array: Any) -> jax.Array:
        if self._programs.whole.is_fully_addressable:
            placed: jax.Array = jax.device_put(array, self._programs.whole)
            return placed
        # ``device_put`` would compare the values of all processes each time.
        values = np.asarray(array)
        return jax.make_array_from_callback(values.shape, self._programs.whole, lambda index: values[index])

    def _padded(self, pages: Ints, with_: int) -> Ints:
        return np.concatenate([pages, np.full(COPIED - len(pages), with_, np.int32)])


def _heads(parts: Sequence[tuple[Ints, int]], every: bool) -> list[Ints]:
    """The heads of the rows, or of each of their tokens."""
    return [heads_of_each(*part) if every else part[0][:, :HEAD] for part in parts]


def _shape(packed: Ints, width: int) -> Shape:
    rows, columns = packed.shape
    return rows, width, columns - HEAD - width


#: Where a shard begins and ends in each dim of its array.
_Place = tuple[tuple[int | None, int | None], ...]
#: An array, or the shards that this process has of it.
Content = jax.Array | npt.NDArray[Any] | Mapping[_Place, Any]


class HostPages:
    """The host's tier of a cache: ``pages`` pages of arrays such as ``contents`` [pages at a time, ...]."""

    def __init__(self, contents: Sequence[jax.ShapeDtypeStruct], pages: int) -> None:
        self._stores = list[dict[_Place, npt.NDArray[Any]]]()
        for content in contents:
            assert isinstance(content.sharding, NamedSharding)
            local_shape = content.sharding.shard_shape(content.shape)
            whole = content.sharding.is_fully_addressable
            shape = (pages, *(content.shape if whole else local_shape)[1:])
            places = {()} if whole else _places(content.sharding, content.shape).values()
            self._stores.append({place: np.zeros(shape, content.dtype) for place in places})

    def keep(self, pages: Ints, contents: Sequence[jax.Array]) -> None:
        """Put the first of ``contents`` into ``pages``, as many as these are."""
        for target, array in zip(self._stores, contents, strict=True):
            for place, shard in _shards(array).items():
                target[place][pages] = np.asarray(shard)[: len(pages)]

    def contents(self, pages: Ints) -> list[Content]:
        """Contents of ``pages``."""
        return [
            store[()][pages] if () in store else {place: shard[pages] for place, shard in store.items()}
            for store in self._stores
        ]


def placed(contents: Sequence[Content], like: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """``contents`` on the devices of ``like``; what is in shards has a shard here for each of this process's."""
    if all(item.sharding is not None and item.sharding.is_fully_addressable for item in like):
        placed: list[jax.Array] = jax.device_put(list(contents), [item.sharding for item in like])
        return placed
    return [_placed(content, item) for content, item in zip(contents, like, strict=True)]


def _placed(content: Content, like: jax.ShapeDtypeStruct) -> jax.Array:
    sharding = like.sharding
    assert isinstance(sharding, NamedSharding)
    if isinstance(content, np.ndarray):
        return jax.make_array_from_callback(like.shape, sharding, lambda index: content[index])
    shards = _shards(content) if isinstance(content, jax.Array) else content
    parts = [jax.device_put(shards[place], device) for device, place in _places(sharding, like.shape).items()]
    return jax.make_array_from_single_device_arrays(like.shape, sharding, parts)


def _shards(array: jax.Array) -> dict[_Place, Any]:
    """The shards of this process, each once; the array itself if this process has all of it."""
    if array.is_fully_addressable:
        return {(): array}
    return {_place(shard.index): shard.data for shard in array.addressable_shards}


def _places(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[jax.Device, _Place]:
    """Shards of each device of this process."""
    result = sharding.addressable_devices_indices_map(shape)
    return {device: _place(index) for device, index in result.items() if index is not None}


def _place(index: tuple[slice, ...]) -> _Place:
    return tuple((item.start, item.stop) for item in index)
