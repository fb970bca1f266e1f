"""A server's side of what comes from other hosts: frames into private memory, and out of it again.

For each worker of another host there is memory in place of the worker's segment, and the same rule of ownership: from
push to answer it is the server's, then it is on its way, and the next push comes only after it has arrived. So nothing
is copied for sending.

Who speaks is what its key was enrolled as, and nothing is written before run, life, name and all sizes are right. A
worker whose connection broke says again what it said last: a gradient that came already must not be written (the
answer may be on its way from there), and an answer that may be lost is sent again.
"""

from __future__ import annotations

import mmap
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from msgspec import structs
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from paceline.core.messages import Parameters, Pull, Push
from paceline.errors import PacelineError
from paceline.runtime.live import wire
from paceline.runtime.live.far import FRAME, FarListener, KeyPair, make_keys
from paceline.runtime.live.holding import Holding
from paceline.runtime.live.mapped import Segment
from paceline.runtime.live.sealing import seal, unseal
from paceline.tensors import halves
from paceline.tensors.layout import Layout

if TYPE_CHECKING:
    from paceline.runtime.live.server import LiveServer

EVERYWHERE = "0.0.0.0"
LINES = 3
"""How often a sender's wrong messages are told of one by one; from then on they are counted."""

Process = tuple[int, int]


class Refused(Exception):
    """A message that is not as it must be."""


class FarSegment(Segment):
    """Memory of this server's own, in place of the segment of a worker on another host.

    As floats travel as they are, gradients and parameters are in one vector. As halves travel, parameters are rounded
    by writing them into a vector of halves, and gradients are widened into another.
    """

    def __init__(self, holding: Holding, way: str) -> None:
        layout, part = holding.layout, holding.part
        self.dtype = halves.travelling(way, layout.torch_dtype)
        gradient = anonymous(layout, layout.torch_dtype)
        same = self.dtype == layout.torch_dtype
        leaving = gradient if same else anonymous(layout, self.dtype)
        super().__init__(leaving, None if same else gradient, part, holding.optimizer)
        itemsize = self.dtype.itemsize
        self.places = halves.cut(gradient, part, FRAME, itemsize)
        self.frames = halves.frames_of(halves.cut(leaving, part, FRAME, itemsize))


def anonymous(layout: Layout, dtype: torch.dtype) -> Tensor:
    """A vector over all parameters of which only what is written to takes memory."""
    nbytes = max(layout.numel * dtype.itemsize, 1)
    buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(buffer, dtype=dtype, count=layout.numel)


class Receiving:
    """Hears the workers of other hosts, for one server, and answers them."""

    def __init__(self, server: LiveServer, abroad: wire.Abroad) -> None:
        self.server = server
        self.abroad = abroad
        self.run = server.config.run
        keys = make_keys() if abroad.keys else None
        self.listener = listen(server.folder / f"port-{server.shard}", abroad, keys)
        self.address = f"tcp://{abroad.advertise or routable(abroad.host)}:{self.listener.port}"
        self.key = keys.public if keys is not None else ""
        self.senders: set[Process] = set()
        """Who has spoken from another host."""
        self.newest: dict[Process, int] = {}
        """The iteration of the last gradient that came of each."""
        self.asked: dict[Process, tuple[int, int]] = {}
        """The iteration, and the attempt at it, each asked for last."""
        self.answers: dict[Process, Parameters] = {}
        """What was answered to that, if anything was."""
        self.refusals: Counter[bytes] = Counter()

    def enrol(self, order: wire.Enrol) -> None:
        self.listener.enrol(order.key, order.name.encode())

    def hear(self) -> None:
        """Take what has come."""
        while (received := self.listener.receive()) is not None:
            self.take(*received)
        self.listener.gone()

    def take(self, name: bytes, message: bytes, frames: Sequence[memoryview]) -> None:
        """A worker's message: refused in one line, or done."""
        try:
            sealed = unseal(message)
            if (sealed.run, sealed.life) != (self.run, self.server.life):
                raise Refused("it was for another run, or for another life of this server")
            request = wire.decode_to_shard(sealed.message)
            if isinstance(request, wire.Fetch):
                self.hand_over(name, request)
                return
            sender = process_of(name)
            for part in request.messages:
                if sender != sender_of(part):
                    raise Refused(f"it speaks as worker {sender_of(part)}")
            self.senders.add(sender)
            self.exchange(sender, request, frames)
        except (*wire.BAD_MESSAGE, halves.WrongFrames, Refused) as error:
            self.refuse(name, str(error))

    def exchange(self, sender: Process, request: wire.Exchange, frames: Sequence[memoryview]) -> None:
        pushes = sum(isinstance(part, Push) for part in request.messages)
        if pushes > 1:
            raise Refused("it pushes twice")
        segment = self.own(sender)
        places = segment.places if pushes and not request.refusal else ()
        halves.check_frames(frames, places, segment.dtype)
        for part in request.messages:
            if isinstance(part, Pull):
                self.pull(sender, part)
            elif part.handle.iteration > self.newest.get(sender, -1):
                self.newest[sender] = part.handle.iteration
                halves.fill(places, frames, segment.dtype)
                self.server.take_push(part, request)

    def pull(self, sender: Process, pull: Pull) -> None:
        asked = (pull.iteration, pull.attempt)
        if asked == self.asked.get(sender) and sender in self.answers:
            self.answer(self.answers[sender])
            return
        self.asked[sender] = asked
        self.answers.pop(sender, None)
        self.server.take_pull(pull)

    def answer(self, parameters: Parameters) -> None:
        """Send the parameters that are in the worker's segment."""
        sender = (parameters.worker, parameters.incarnation)
        self.answers[sender] = parameters
        self.send(b"%d:%d" % sender, wire.encode(parameters), self.own(sender).frames)

    def hand_over(self, name: bytes, request: wire.Fetch) -> None:
        """The optimizer's state, as frames."""
        try:
            state, failed = memoryview(save(self.server.holding.optimizer.state())), ""
        except SafetensorError as problem:
            state, failed = memoryview(b""), str(problem)
        frames = [state[at : at + FRAME] for at in range(0, len(state), FRAME)]
        self.send(name, wire.encode(wire.Fetched(request.file, failed)), frames)

    def send(self, name: bytes, message: bytes, frames: Sequence[memoryview]) -> None:
        # Who is not connected says it again once it is.
        self.listener.send(name, seal(self.run, self.server.life, message), frames)

    def refuse(self, name: bytes, reason: str) -> None:
        self.refusals[name] += 1
        count = self.refusals[name]
        if count <= LINES:
            more = "" if count < LINES else " (and what else comes of it is counted only)"
            print(f"server {self.server.shard}: refused a message of {name!r}: {reason}{more}", file=sys.stderr)

    def own(self, sender: Process) -> FarSegment:
        """The memory of a worker on another host."""
        segment = self.server.segment(*sender)
        assert isinstance(segment, FarSegment)
        return segment

    def segment(self, sender: Process) -> FarSegment | None:
        """New memory for this worker, if it is on another host."""
        return FarSegment(self.server.holding, self.abroad.wire) if sender in self.senders else None

    def forget(self, senders: set[Process]) -> None:
        """These are no members any more."""
        for sender in senders:
            self.listener.expel(b"%d:%d" % sender)
            self.senders.discard(sender)
            for kept in (self.newest, self.asked, self.answers):
                kept.pop(sender, None)

    def close(self) -> None:
        for name, count in self.refusals.items():
            if count > LINES:
                print(f"server {self.server.shard}: refused {count} messages of {name!r}", file=sys.stderr)
        self.listener.close()


def listen(file: Path, abroad: wire.Abroad, keys: KeyPair | None) -> FarListener:
    """Where this server listened in its last life, if that is free; and remember where."""
    listener = None
    if file.exists():
        port = int(file.read_text())
        try:
            listener = FarListener(abroad.host, (port, port), keys)
        except PacelineError:
            listener = None
    if listener is None:
        listener = FarListener(abroad.host, abroad.ports, keys)
    file.write_text(str(listener.port))
    return listener


def routable(host: str) -> str:
    """The address to tell others, of a listener on all interfaces: that of the one that leads outside."""
    return host if host != EVERYWHERE else leading_to("192.0.2.1")


def leading_to(address: str) -> str:
    """The address of this host on the interface that leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # nothing is sent: the kernel says which interface it would leave by
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def localized(abroad: wire.Abroad, driver: str) -> wire.Abroad:
    """How processes of this host are to listen: on the interface that leads to the driver, at tcp://HOST:PORT."""
    here = leading_to(driver.removeprefix("tcp://").rpartition(":")[0])
    return structs.replace(abroad, host=here, advertise=here)


def process_of(name: bytes) -> Process:
    """Rank and incarnation, from a name."""
    rank, _, incarnation = name.partition(b":")
    try:
        return int(rank), int(incarnation)
    except ValueError:
        raise Refused("its name is no worker's") from None


def sender_of(message: Push | Pull) -> Process:
    """Worker and incarnation."""
    if isinstance(message, Push):
        return message.handle.source, message.handle.incarnation
    return message.worker, message.incarnation
