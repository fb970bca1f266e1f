"""A worker's link to a server on another host: what is shared memory on one host travels here as frames.

To the worker it is a link like any other. Behind an `Exchange` that pushes a gradient go the gradient's frames; the
frames behind `Parameters` are in the segment when the message is handed over. Where nothing has to be decrypted or
widened they are read straight into it: if the connection breaks meanwhile, part of them is there, as with a server of
this host that dies while it answers. An answer that nobody waits for any more, the question having been asked twice
over a connection that broke, is left alone: its place may hold the next gradient by then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate, count
from pathlib import Path
from typing import TypeGuard

import msgspec
from torch import Tensor

from paceline.core.messages import Handle, Parameters, Pull, Push
from paceline.errors import PacelineError
from paceline.runtime.live import wire
from paceline.runtime.live.across.far import FRAME, FarLink, KeyPair
from paceline.runtime.live.across.pages import keep_freed
from paceline.runtime.live.across.sealing import seal, unseal
from paceline.runtime.live.configuration import Door
from paceline.runtime.live.worker.early import Ahead
from paceline.runtime.live.worker.segments import Segments
from paceline.tensors import halves
from paceline.tensors.assignment import Ranges

Frame = memoryview | tuple[memoryview, ...]
NOTHING = -1
"""Before the first iteration."""
WORTH_IT = 1 << 13
"""Elements of a tensor that take as long to copy as it takes to find out where they are."""


def key_path(folder: Path, rank: int, incarnation: int) -> Path:
    """Where a process finds its own key pair, in a run with keys."""
    return folder / f"key-{rank}.{incarnation}"


def find_keys(folder: Path, rank: int, incarnation: int) -> KeyPair:
    path = key_path(folder, rank, incarnation)
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeyPair)
    except (OSError, msgspec.MsgspecError) as error:
        raise PacelineError(f"worker {rank} has no key to reach servers on other hosts: {error}") from None


class Cargo:
    """What of a worker travels: its segments, rounded if that is the run's way."""

    def __init__(self, folder: Path, segments: Segments, way: str) -> None:
        self.folder = folder
        self.parameters = segments.parameters
        self.gradient = segments.gradient
        self.layout = layout = segments.layout
        keep_freed(4 * layout.numel * layout.itemsize)
        self.dtype = halves.travelling(way, layout.torch_dtype)
        self.feedback: halves.ErrorFeedback | None = None
        if self.dtype != layout.torch_dtype:
            self.feedback = halves.ErrorFeedback(layout.numel, layout.torch_dtype, self.dtype)
        self.rounded: dict[Ranges, Handle] = {}
        """The push whose gradient is there, rounded, in each part: what is said again must not be rounded again."""
        self.leaves_early = self.feedback is None and self.gradient is not self.parameters
        """Gradients are staged while backward runs, and travel as they are."""
        self.loose: Sequence[Tensor] = ()
        """The gradient, if it travels from where it is and is in no segment."""
        self.attempts = count()

    def may_be_loose(self, gradients: Sequence[Tensor | None]) -> TypeGuard[Sequence[Tensor]]:
        """Whether this gradient may travel from where it is, and is in so few pieces that this is worth it."""
        if self.feedback is not None or self.gradient is not self.parameters:
            return False
        if self.layout.numel < WORTH_IT * len(gradients):
            return False
        return all(
            each is not None
            and each.device.type == "cpu"
            and each.dtype == self.layout.torch_dtype
            and each.is_contiguous()
            for each in gradients
        )


class FarShard:
    """A link to one server on another host, and its part of the worker's memory."""

    def __init__(self, door: Door, name: bytes, run: str, keys: KeyPair | None, cargo: Cargo) -> None:
        same = cargo.dtype == cargo.layout.torch_dtype
        self.gathers = keys is None
        """It can send what lies in several places."""
        self.link = FarLink(
            door.address, name, keys, door.key, landing=self.land if same else None, aside=cargo.leaves_early
        )
        self.run = run
        self.life = door.life
        self.cargo = cargo
        self.awaited = NOTHING
        """The iteration that was asked for and is not answered yet."""
        self.answered = NOTHING
        """The iteration of the last answer over this connection: no other's gradient leaves early."""
        self.landed = False
        """What is awaited is being read, or was, into the segment."""
        self.part: Ranges = ()

    @property
    def gone(self) -> bool:
        return self.link.gone

    def carry(self, part: Ranges) -> None:
        """This is what the server has of the parameters, from now on."""
        self.part = part
        cargo = self.cargo
        itemsize = cargo.dtype.itemsize
        ranges = halves.stretches(cargo.layout, part, FRAME, itemsize)
        begins = [itemsize * begin for begin in accumulate((entry.numel for entry in cargo.layout.entries), initial=0)]
        self.pieces = [
            [
                (piece.entry, itemsize * piece.start - begins[piece.entry], itemsize * piece.length)
                for piece in cargo.layout.pieces((each,), cargo.layout.numel)
            ]
            for each in ranges
        ]
        """Of each frame: the parts of tensors it is made of; which tensor, from which byte of it on, how many."""
        self.places = halves.cut(cargo.parameters, ranges, FRAME, itemsize)
        self.ground = halves.frames_of(self.places) if cargo.feedback is None else []
        source = cargo.gradient if cargo.feedback is None else cargo.feedback.rounded
        self.frames = halves.frames_of(halves.cut(source, ranges, FRAME, itemsize))
        self.ahead = Ahead(cargo.layout, ranges, cargo.attempts) if cargo.leaves_early else None

    def reopen(self) -> None:
        self.link.reopen()
        self.answered = NOTHING
        self.landed = False
        if self.ahead is not None:
            self.ahead.begin()

    def stage(self, index: int, iteration: int) -> None:
        """A tensor's gradient is in its place: send the frames that are whole by now."""
        if self.ahead is None or self.answered != iteration:
            return
        for number in self.ahead.stage(index):
            staged = wire.encode(wire.Staged(iteration, self.ahead.attempt, number))
            self.link.send(seal(self.run, self.life, staged), [self.frames[number]])

    def say(self, request: wire.Exchange | wire.Fetch) -> None:
        """With the gradient behind it, if there is one in it."""
        frames: Sequence[Frame] = ()
        said: wire.Exchange | wire.Fetch | wire.Commit = request
        if isinstance(request, wire.Exchange):
            for part in request.messages:
                if isinstance(part, Pull):
                    self.awaited, self.landed = part.iteration, False
                else:
                    frames = () if request.refusal else self._load(part)
                    if self.ahead is not None and (left := self.ahead.complete(request, frames)) is not None:
                        said, frames = left
        self.link.send(seal(self.run, self.life, wire.encode(said)), frames)

    def _load(self, push: Push) -> Sequence[Frame]:
        cargo = self.cargo
        if cargo.loose:
            memory = halves.frames_of([each.detach().view(-1) for each in cargo.loose])
            return [tuple(memory[tensor][at : at + size] for tensor, at, size in frame) for frame in self.pieces]
        if cargo.feedback is not None and cargo.rounded.get(self.part) != push.handle:
            cargo.feedback.round(cargo.gradient, self.part)
            cargo.rounded[self.part] = push.handle
        return self.frames

    def land(self, message: bytes, lengths: Sequence[int]) -> Sequence[memoryview] | None:
        """Where the frames behind this message belong, if it is the answer that is awaited; once."""
        if self.landed or list(lengths) != [len(frame) for frame in self.ground]:
            return None
        try:
            parameters = self._open(message)
        except wire.BAD_MESSAGE:
            return None
        self.landed = isinstance(parameters, Parameters)
        return self.ground if self.landed else None

    def _open(self, message: bytes) -> Parameters | wire.Fetched | None:
        """What this is, if it is for us and awaited."""
        sealed = unseal(message)
        if (sealed.run, sealed.life) != (self.run, self.life):
            return None
        opened: Parameters | wire.Fetched = wire.decode_from_shard(sealed.message)
        if isinstance(opened, Parameters) and (self.awaited == NOTHING or opened.iteration < self.awaited):
            return None
        return opened

    def hear(self, timeout_s: float) -> Parameters | wire.Fetched | None:
        """The next message, or None if there is none within the time."""
        received = self.link.wait_for(timeout_s)
        if received is None:
            return None
        message, frames = received
        try:
            opened = self._open(message)
            if opened is None:
                return None
            if isinstance(opened, Parameters):
                if not self.landed:
                    halves.fill(self.places, frames, self.cargo.dtype)
                self.awaited, self.answered = NOTHING, opened.iteration
            elif not opened.error:
                with (self.cargo.folder / Path(opened.file).name).open("wb") as file:
                    file.writelines(frames)
        except (*wire.BAD_MESSAGE, halves.WrongFrames) as error:
            print(f"refused what {self.link.address} sent: {error}", file=sys.stderr)
            return None
        return opened

    def close(self) -> None:
        self.link.close()
