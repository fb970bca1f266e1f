"""A server's side of what comes from other hosts: frames into private memory, and out of it again.

For each worker of another host there is memory in place of the worker's segment, and the same rule of ownership: from
push to answer it is the server's, then it is on its way, and the next push comes only after it has arrived. So nothing
is copied for sending. Where the kernel takes what is sent at once (`plain.py`), even that memory is not needed:
parameters leave from where they are stepped. An answer that is sent a second time then holds what they are by then.

Who speaks is what its key was enrolled as, and nothing is written before run, life, name and all sizes are right. A
worker whose connection broke says again what it said last: a gradient that came already must not be written (the
answer may be on its way from there), and an answer that may be lost is sent again.
"""

from __future__ import annotations

import mmap
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from paceline.core.messages import Parameters, Pull, Push
from paceline.errors import PacelineError
from paceline.runtime.live import wire
from paceline.runtime.live.across.addresses import routable
from paceline.runtime.live.across.far import FRAME, FarListener, KeyPair, make_keys
from paceline.runtime.live.across.pages import keep_freed
from paceline.runtime.live.across.sealing import seal, unseal
from paceline.runtime.live.configuration import Abroad
from paceline.runtime.live.server.holding import Holding
from paceline.runtime.live.server.mapped import Segment
from paceline.runtime.live.worker.early import Kept
from paceline.tensors import halves
from paceline.tensors.assignment import Ranges
from paceline.tensors.layout import Layout, Piece

if TYPE_CHECKING:
    from paceline.runtime.live.server.server import LiveServer

AT_ONCE = 64
"""Messages heard before everything else has its turn."""
LINES = 3
"""How often a sender's wrong messages are told of one by one; from then on they are counted."""

Process = tuple[int, int]


class Refused(Exception):
    """A message that is not as it must be."""


class FarSegment(Segment):
    """Memory of this server's own, in place of the segment of a worker on another host.

    As floats travel as they are, a gradient stays in the frames it came in, and what leaves is the parameters' vector.
    (Only if frames end within the optimizer's pieces, these being whole large tensors, gradients are joined in the same
    vector.) As halves travel, parameters are rounded by writing them into a vector of halves, and gradients are widened
    into another. If they may leave `at_once`, floats leave from the server's own vector.
    """

    def __init__(self, holding: Holding, way: str, at_once: bool) -> None:
        layout, part = holding.layout, holding.part
        self.dtype = halves.travelling(way, layout.torch_dtype)
        same = self.dtype == layout.torch_dtype
        leaving = anonymous(layout, self.dtype)
        arriving = leaving if same else anonymous(layout, layout.torch_dtype)
        super().__init__(leaving, None if same else arriving, part, holding.optimizer)
        itemsize = self.dtype.itemsize
        ranges = halves.stretches(layout, part, FRAME, itemsize)
        self.places = halves.cut(arriving, ranges, FRAME, itemsize)
        self.shows_servers = at_once and same
        lengths = [stop - start for start, stop in ranges]
        parts = (
            holding.optimizer.values.split(lengths)
            if self.shows_servers
            else halves.cut(leaving, ranges, FRAME, itemsize)
        )
        self.frames = halves.frames_of(parts)
        self.within = find(holding.optimizer.pieces, ranges, itemsize) if same else None
        """Of each piece: the frame it comes in, from which byte of it on, and how many elements it has."""
        self.kept = Kept(self.places, self.dtype)
        """What has come of a gradient that is still being computed."""
        self.let_frames_go()

    def take(self, frames: Sequence[memoryview]) -> None:
        """Have `gradient` be what came in these frames."""
        if self.within is None:
            halves.fill(self.places, frames, self.dtype)
        else:
            self.gradient = [
                torch.frombuffer(frames[frame], dtype=self.dtype, offset=offset, count=count)
                for frame, offset, count in self.within
            ]
            self.arrived = list(frames)

    def keep(self) -> list[Tensor]:
        return super().keep() if self.within is None else self.gradient

    def let_frames_go(self) -> None:
        """The worker is answered: its gradient is used, dropped, or kept by somebody else."""
        if self.within is not None:
            self.gradient, self.arrived = [], []


def find(pieces: Sequence[Piece], ranges: Ranges, itemsize: int) -> list[tuple[int, int, int]] | None:
    """In which range each piece lies, from which byte of it on, and its length; None if one does not lie in one."""
    within, frame = [], 0
    for piece in pieces:
        while ranges[frame][1] <= piece.start:
            frame += 1
        start, stop = ranges[frame]
        if piece.start + piece.length > stop:
            return None
        within.append((frame, itemsize * (piece.start - start), piece.length))
    return within


def anonymous(layout: Layout, dtype: torch.dtype) -> Tensor:
    """A vector over all parameters of which only what is written to takes memory."""
    nbytes = max(layout.numel * dtype.itemsize, 1)
    buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(buffer, dtype=dtype, count=layout.numel)


class Receiving:
    """Hears the workers of other hosts, for one server, and answers them."""

    def __init__(self, server: LiveServer, abroad: Abroad) -> None:
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
        self.unsent: set[Process] = set()
        """Whose answer found nobody connected: it leaves when somebody is."""
        self.refusals: Counter[bytes] = Counter()

    def enrol(self, order: wire.Enrol) -> None:
        if order.key:
            self.listener.enrol(order.key, order.name.encode())
        else:
            self.listener.expel(order.name.encode())

    def hear(self) -> None:
        """Take what has come."""
        for _ in range(AT_ONCE):
            if (received := self.listener.receive()) is None:
                break
            self.take(*received)
        self.listener.gone()

    def take(self, name: bytes, message: bytes, frames: Sequence[memoryview]) -> None:
        """A worker's message: refused in one line, or done."""
        try:
            sealed = unseal(message)
            if (sealed.run, sealed.life) != (self.run, self.server.life):
                raise Refused("it was for another run, or for another life of this server")
            request = wire.decode_from_afar(sealed.message)
            if isinstance(request, wire.Fetch):
                self.hand_over(name, request)
                return
            sender = process_of(name)
            if isinstance(request, wire.Staged):
                self.stage(sender, request, frames)
                return
            exchange = request.exchange if isinstance(request, wire.Commit) else request
            for part in exchange.messages:
                if sender != sender_of(part):
                    raise Refused(f"it speaks as worker {sender_of(part)}")
            self.senders.add(sender)
            if isinstance(request, wire.Commit):
                self.commit(sender, request, frames)
            else:
                self.exchange(sender, exchange, frames)
        except (*wire.BAD_MESSAGE, halves.WrongFrames, Refused) as error:
            self.refuse(name, str(error))

    def stage(self, sender: Process, staged: wire.Staged, frames: Sequence[memoryview]) -> None:
        """A frame of the gradient that this worker computes on what it was answered last."""
        if staged.iteration <= self.newest.get(sender, -1):
            return  # over a connection that broke, and what was sent in its place is here
        answer = self.answers.get(sender)
        if answer is None or answer.iteration != staged.iteration:
            raise Refused(f"it does not compute iteration {staged.iteration}")
        self.own(sender).kept.take(staged, frames)

    def commit(self, sender: Process, request: wire.Commit, rest: Sequence[memoryview]) -> None:
        """An exchange whose gradient has come in part."""
        exchange = request.exchange
        push = next((part for part in exchange.messages if isinstance(part, Push)), None)
        if push is None:
            raise Refused("it commits without a push")
        if push.handle.iteration > self.newest.get(sender, -1):  # or the whole exchange was sent in its place
            self.exchange(sender, exchange, self.own(sender).kept.join(push, request, rest))

    def exchange(self, sender: Process, request: wire.Exchange, frames: Sequence[memoryview]) -> None:
        pushes = sum(isinstance(part, Push) for part in request.messages)
        if pushes > 1:
            raise Refused("it pushes twice")
        if request.hyper is not None and len(request.hyper) != len(self.server.holding.spec.groups):
            raise Refused(f"it has hyper-parameters of {len(request.hyper)} groups")
        segment = self.own(sender)
        places = segment.places if pushes and not request.refusal else ()
        halves.check_frames(frames, places, segment.dtype)
        for part in request.messages:
            if isinstance(part, Pull):
                self.pull(sender, part)
            elif part.handle.iteration > self.newest.get(sender, -1):
                self.newest[sender] = part.handle.iteration
                segment.kept.clear()
                if places:
                    segment.take(frames)
                self.server.take_push(part, request)

    def pull(self, sender: Process, pull: Pull) -> None:
        asked = (pull.iteration, pull.attempt)
        if asked == self.asked.get(sender) and sender in self.answers:
            self.answer(self.answers[sender])
            return
        self.asked[sender] = asked
        self.answers.pop(sender, None)
        self.unsent.discard(sender)
        self.server.take_pull(pull)

    def answer(self, parameters: Parameters) -> None:
        """Send the parameters: from the worker's segment, or from where they are stepped."""
        sender = (parameters.worker, parameters.incarnation)
        self.answers[sender] = parameters
        segment = self.own(sender)
        segment.let_frames_go()
        if self.send(b"%d:%d" % sender, wire.encode(parameters), segment.frames, segment.shows_servers):
            self.unsent.discard(sender)
        else:
            self.unsent.add(sender)

    def catch_up(self) -> None:
        """Send what could not be sent, to those who are connected by now."""
        for sender in [each for each in self.unsent if self.listener.connected(b"%d:%d" % each)]:
            self.answer(self.answers[sender])

    def hand_over(self, name: bytes, request: wire.Fetch) -> None:
        """The optimizer's state, as frames."""
        try:
            state, failed = memoryview(save(self.server.holding.optimizer.state())), ""
        except SafetensorError as problem:
            state, failed = memoryview(b""), str(problem)
        frames = [state[at : at + FRAME] for at in range(0, len(state), FRAME)]
        self.send(name, wire.encode(wire.Fetched(request.file, failed)), frames)

    def send(self, name: bytes, message: bytes, frames: Sequence[memoryview], passing: bool = False) -> bool:
        """False if that worker is not connected right now."""
        return self.listener.send(name, seal(self.run, self.server.life, message), frames, passing)

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
        if sender not in self.senders:
            return None
        layout = self.server.holding.layout
        keep_freed(4 * layout.numel * layout.itemsize)
        return FarSegment(self.server.holding, self.abroad.wire, not self.abroad.keys)

    def forget(self, senders: set[Process]) -> None:
        """These are no members any more."""
        for sender in senders:
            self.listener.expel(b"%d:%d" % sender)
            self.senders.discard(sender)
            self.unsent.discard(sender)
            for kept in (self.newest, self.asked, self.answers):
                kept.pop(sender, None)

    def close(self) -> None:
        for name, count in self.refusals.items():
            if count > LINES:
                print(f"server {self.server.shard}: refused {count} messages of {name!r}", file=sys.stderr)
        self.listener.close()


def listen(file: Path, abroad: Abroad, keys: KeyPair | None) -> FarListener:
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
