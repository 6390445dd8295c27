"""Several processes as one engine, under ``jax.distributed``: one mesh over the devices of all of them.

The first process answers and schedules. What a step needs of the host (tokens, block tables, how to sample: kilobytes)
it sends to the others over a link (``link``) before it begins the step itself; all run the same programs
in the same order. What comes out is alike on all of them, and the first one reads it.

The first one says ``begin``, then the methods of ``Replica`` by their names, and ``stop``. The others say ``here``
(what they serve), ``ready`` when their programs are compiled, twice a second ``beat`` with the commands that they have
begun, and ``stop`` when they are told to end.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import rooftop
from rooftop.core.errors import RooftopError
from rooftop.scheduling.serving.prefixes import Copy
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.engine.loading import parts
from rooftop.serve.engine.programs import COPIED, Key
from rooftop.serve.engine.replica import Adjusted, Content, Ints, Replica
from rooftop.serve.hosts.handover import fingerprint
from rooftop.serve.hosts.link import Buffer, Link, LinkListener, LinkLost, Message, connect
from rooftop.serve.hosts.processes import BEAT_S, LOADING_S, SILENT_S, STARVED_S
from rooftop.serve.sockets import bind


class JoinedReplica(Replica):
    """A ``Replica`` of several processes. If it only prefills, each process takes whole pages."""

    _role = "both"

    def compile(self, on_progress: Callable[[int, int], None] | None = None, *, role: str = "both") -> int:
        """See ``Replica``."""
        self._role = role
        return super().compile(on_progress, role=role)

    def _program_keys(self, role: str) -> list[Key]:
        return super()._program_keys(role) + ([("gather",)] if role == "prefill" else [])

    def take(self, pages: Ints) -> Sequence[jax.Array]:
        """See ``Replica``."""
        if self._role != "prefill":
            return super().take(pages)
        padded = self._put(self._padded(pages, self.pages))
        result: Sequence[jax.Array] = self._programs["gather",](self._pools, padded)
        return jax.block_until_ready(result) if self._one_at_a_time else result

    def fill(self, pages: Ints, contents: Sequence[np.ndarray[Any, Any]]) -> None:
        """``put`` of pages as ``page_parts`` has them."""
        arrays = [
            part.view(leaf.dtype).reshape(COPIED, *leaf.shape[1:])
            for part, leaf in zip(contents, self.pool_leaves, strict=True)
        ]
        self.put(pages, arrays)


def page_parts(contents: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Pages [COPIED, ...] of each pool array as bytes: a dtype such as bfloat16 has no name that NumPy knows."""
    return [np.ascontiguousarray(content).reshape(-1).view(np.uint8) for content in contents]


#: Bytes of the broadcast address of the first process.
_WHERE = 512


@dataclass
class _Heard:
    """A follower as it was heard last: when, if it has compiled, and the commands that it has begun."""

    at_s: float
    ready: bool = False
    commands: int = 0


class Followers:
    """The other processes, seen from the first.

    Other threads call ``on_lost`` when a process is lost or silent, and ``on_stop`` when one is asked to end.
    """

    def __init__(self, links: Sequence[Link], on_lost: Callable[[str], None], on_stop: Callable[[], None]) -> None:
        self.on_lost, self.on_stop = on_lost, on_stop
        self._links, self._numbers = list(links), count()
        self._ready = threading.Semaphore(0)
        self._ended = False
        self._sent = 0
        self._heard = {process: _Heard(time.monotonic()) for process in range(1, len(self._links) + 1)}
        for process, link in enumerate(self._links, 1):
            threading.Thread(target=self._hear, args=(process, link), name="rooftop follower", daemon=True).start()
        threading.Thread(target=self._watch, name="rooftop watchdog", daemon=True).start()

    @property
    def doing(self) -> str:
        """The commands that each process has begun, of those that it was sent: for those who ask why a step hangs."""
        return ", ".join(
            f"process {process} in command {heard.commands} of {self._sent}" for process, heard in self._heard.items()
        )

    def tell(self, kind: str, arrays: Sequence[np.ndarray[Any, Any]] = (), **fields: Any) -> None:
        """Send command ``kind`` to all followers; ``arrays`` are copied before this returns."""
        self._sent += 1
        shapes = [[list(array.shape), array.dtype.str] for array in arrays]
        sent: list[Buffer] = [array.tobytes() for array in arrays]
        for link in self._links:
            link.send(kind, payload=(lambda: sent) if sent else None, arrays=shapes, **fields)

    def number(self) -> int:
        """Number of the next replica: all processes create theirs in the same order."""
        return next(self._numbers)

    def wait(self) -> None:
        """Wait until all followers have compiled their programs."""
        for _ in self._links:
            self._ready.acquire()

    def stop(self) -> None:
        """End all followers."""
        self._ended = True
        self.tell("stop")
        for link in self._links:
            link.finish()

    def _hear(self, process: int, link: Link) -> None:
        heard = self._heard[process]
        try:
            while True:
                message = link.receive()
                heard.at_s = time.monotonic()
                if message.kind == "ready":
                    heard.ready = True
                    self._ready.release()
                elif message.kind == "beat":
                    heard.commands = message.fields["commands"]
                elif message.kind == "stop":
                    self.on_stop()
        except LinkLost as lost:
            if not self._ended:
                self.on_lost(f"process {process} of the engine is lost ({lost})")

    def _watch(self) -> None:
        """Notice a follower that is silent: the kernel keeps the link of a process that is stopped."""
        looked_s = time.monotonic()
        while not self._ended:
            time.sleep(BEAT_S)
            now_s = time.monotonic()
            if now_s - looked_s > STARVED_S:
                # This process was stopped, or had no core: what the others said is yet to be heard.
                for heard in self._heard.values():
                    heard.at_s = now_s
            looked_s = now_s
            for process, heard in self._heard.items():
                silent_s = now_s - heard.at_s
                if silent_s > (SILENT_S if heard.ready else LOADING_S) and not self._ended:
                    progress = f"command {heard.commands} of {self._sent}"
                    self.on_lost(
                        f"process {process} of the engine has not answered for {silent_s:.0f} s, in {progress}"
                    )
                    return


class Leading(JoinedReplica):
    """A replica whose ``followers`` repeat every call."""

    def __init__(self, followers: Followers, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._followers, self._number, self._compiled = followers, followers.number(), False

    def compile(self, on_progress: Callable[[int, int], None] | None = None, *, role: str = "both") -> int:
        """See ``Replica``; all processes compile at the same time."""
        self._tell("compile", role=role)
        self._compiled = False
        programs = super().compile(on_progress, role=role)
        self._compiled = True
        return programs

    def beside(self) -> Leading:
        """See ``Replica``."""
        other = super().beside()
        assert isinstance(other, Leading)
        other._number, other._compiled = self._followers.number(), False
        return other

    def allocate(self) -> None:
        """See ``Replica``."""
        if self._compiled:
            # The others have allocated when they compiled.
            self._tell("allocate")
        super().allocate()

    def step(self, *parts: tuple[Ints, int], every: bool = False, stream: jax.Array | None = None) -> Any:
        """See ``Replica``."""
        self._tell("step", *(packed for packed, _ in parts), widths=[width for _, width in parts], every=every)
        return super().step(*parts, every=every, stream=stream)

    def propose(self, packed: Ints) -> Ints:
        """See ``Replica``."""
        self._tell("propose", packed)
        return super().propose(packed)

    def adjust(self, slot: int, adjusted: Adjusted) -> None:
        """See ``Replica``."""
        self._tell("adjust", adjusted.bias, adjusted.seen, adjusted.mask, adjusted.penalties, slot=slot)
        super().adjust(slot, adjusted)

    def set_mask(self, slot: int, mask: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
        """See ``Replica``."""
        self._tell("set_mask", mask, slot=slot)
        super().set_mask(slot, mask)

    def copy(self, copies: Iterable[Copy]) -> None:
        """See ``Replica``; each process has its own shards in its own host's memory."""
        every = list(copies)
        self._tell("copy", copies=[[item.to_host, item.source, item.target] for item in every])
        super().copy(every)

    def take(self, pages: Ints) -> Sequence[jax.Array]:
        """See ``Replica``; what the others take so, the next ``put`` puts."""
        self._tell("take", pages)
        return super().take(pages)

    def put(self, pages: Ints, contents: Sequence[Content]) -> None:
        """See ``Replica``; ``contents`` are what was taken last, or have come from elsewhere."""
        came = [content for content in contents if isinstance(content, np.ndarray)]
        if came:
            self._tell("fill", pages, *page_parts(came))
        else:
            self._tell("put", pages)
        super().put(pages, contents)

    def _tell(self, kind: str, *arrays: np.ndarray[Any, Any], **fields: Any) -> None:
        self._followers.tell(kind, arrays, replica=self._number, **fields)


def gather(
    checkpoint: Path,
    configuration: Configuration,
    host: str,
    *,
    draft: Path | None = None,
    on_lost: Callable[[str], None],
    on_stop: Callable[[], None],
) -> Followers:
    """In the first process: links to all others, which reach it at ``host``.

    Raises RooftopError where one of them serves something else.
    """
    ours, key = _facts(checkpoint, configuration, draft), secrets.token_hex()
    with bind(host, 0) as listening:
        listening.listen(jax.process_count())
        _shared(json.dumps([host, listening.getsockname()[1], key]))
        links, listener = dict[int, Link](), LinkListener(listening, key)
        while len(links) < jax.process_count() - 1:
            try:
                link = listener.accept()
            except LinkLost:
                # A stranger: the other processes are yet to come.
                continue
            theirs = link.receive().fields
            links[theirs["process"]] = link
            for name, value in ours.items():
                if theirs["facts"][name] != value:
                    field = f"{name} of process {theirs['process']}"
                    raise RooftopError(field, theirs["facts"][name], f"{value}, as in process 0")
        # The listener's thread ends with this, and not with the socket's end alone.
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
    followers = Followers([links[process] for process in sorted(links)], on_lost, on_stop)
    followers.tell("begin")
    return followers


class Follower:
    """One of the other processes: it repeats the calls of the first one, until that ends.

    ``on_lost`` is called, from another thread, when the first one is lost. Raises RooftopError and Infeasible as
    ``loading.load`` does.
    """

    def __init__(
        self,
        checkpoint: Path,
        configuration: Configuration,
        *,
        draft: Path | None = None,
        options: Mapping[str, Any] | None = None,
        on_lost: Callable[[str], None],
    ) -> None:
        self._on_lost, self._messages = on_lost, Queue[Message]()
        host, port, key = json.loads(_shared(""))
        try:
            self._link = connect(host, port, key)
        except LinkLost as lost:
            raise RooftopError(
                "coordinator", f"{host}:{port}", f"where the first process is reached ({lost})"
            ) from None
        facts = _facts(checkpoint, configuration, draft)
        self._link.send("here", process=jax.process_index(), facts=facts)
        self._commands = 0
        threading.Thread(target=self._hear, name="rooftop leader", daemon=True).start()
        threading.Thread(target=self._beat, name="rooftop beat", daemon=True).start()
        # If we serve something else, the first process reports that and ends.
        self._messages.get()
        self._commands += 1
        self._parts = parts(checkpoint, configuration, draft, None, options, replica=JoinedReplica)

    def stop(self) -> None:
        """Have the first process finish running requests, and end all processes."""
        self._link.send("stop")

    def run(self, on_ready: Callable[[], None]) -> None:
        """Follow until the first process has ended; ``on_ready`` is called once all programs are compiled."""
        replicas = [*self._parts.replicas, *([] if self._parts.draft is None else [self._parts.draft])]
        waiting, taken = len(replicas), list[jax.Array]()
        while (message := self._messages.get()).kind != "stop":
            self._commands += 1
            _do(replicas[message.fields["replica"]], message, taken)
            if message.kind == "compile":
                waiting -= 1
                if not waiting:
                    self._link.send("ready")
                    on_ready()
        self._link.close()

    def _beat(self) -> None:
        while self._link.open:
            self._link.send("beat", commands=self._commands)
            time.sleep(BEAT_S)

    def _hear(self) -> None:
        try:
            while True:
                message = self._link.receive()
                if message.payload is None:
                    self._link.close("a message came damaged")
                    continue
                self._messages.put(message)
                if message.kind == "stop":
                    return
        except LinkLost as lost:
            self._on_lost(f"the first process of the engine is lost ({lost})")


def _do(replica: JoinedReplica, message: Message, taken: list[jax.Array]) -> None:
    """Run a command of the first process; ``taken`` holds pages on their way from replica to replica."""
    fields, at = message.fields, 0
    arrays = list[np.ndarray[Any, Any]]()
    for shape, name in fields["arrays"]:
        dtype = np.dtype(name)
        elements = int(np.prod(shape, dtype=np.int64))
        assert message.payload is not None, "checked where it came"
        arrays.append(np.frombuffer(message.payload, dtype, elements, at).reshape(shape))
        at += elements * dtype.itemsize
    match message.kind:
        case "compile":
            replica.compile(role=fields["role"])
        case "allocate":
            replica.allocate()
        case "step":
            replica.step(*zip(arrays, fields["widths"], strict=True), every=fields["every"])
        case "propose":
            replica.propose(arrays[0])
        case "adjust":
            bias, seen, mask, penalties = arrays
            replica.adjust(fields["slot"], Adjusted(bias=bias, seen=seen, mask=mask, penalties=penalties))
        case "set_mask":
            replica.set_mask(fields["slot"], arrays[0])
        case "copy":
            replica.copy(
                Copy(to_host=to_host, source=tuple(source), target=tuple(target))
                for to_host, source, target in fields["copies"]
            )
        case "take":
            taken[:] = replica.take(arrays[0])
        case "put":
            replica.put(arrays[0], list(taken))
        case "fill":
            replica.fill(arrays[0], arrays[1:])


def _facts(checkpoint: Path, configuration: Configuration, draft: Path | None) -> dict[str, Any]:
    """Facts that all processes must share, as JSON."""
    fields = asdict(configuration)
    fields |= fields.pop("policy")
    return {name: str(value) for name, value in fields.items()} | {
        "version": rooftop.__version__,
        "checkpoint": fingerprint(checkpoint),
        "draft": None if draft is None else fingerprint(draft),
    }


def _shared(text: str) -> str:
    """The ``text`` of the first process, in all of them."""
    encoded = np.zeros(_WHERE, np.uint8)
    encoded[: len(text.encode())] = np.frombuffer(text.encode(), np.uint8)
    return bytes(multihost_utils.broadcast_one_to_all(encoded)).rstrip(b"\0").decode()


def own_host(coordinator: str) -> str:
    """Address at which the others reach the first process: the coordinator's, or that of its outgoing route."""
    if coordinator == "auto":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                # An address for documentation (RFC 5737): nothing is sent, but the route is known. A machine's own name
                # often resolves to a loopback address.
                probe.connect(("192.0.2.1", 9))
                return str(probe.getsockname()[0])
            except OSError:
                return socket.gethostbyname(socket.gethostname())
    return coordinator.rpartition(":")[0].removeprefix("[").removesuffix("]")
