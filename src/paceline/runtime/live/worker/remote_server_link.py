"""A worker's link to a server on another host: what is shared memory on one host travels here as frames.

To the worker it is a link like any other. Behind an `Exchange` that pushes a gradient go the gradient's frames; the
frames behind `Parameters` are in the segment when the message is returned. Where nothing has to be decrypted or
decoded they are read straight into it: if the connection breaks meanwhile, part of them is there, as with a server of
this host that dies while it answers. An answer that nobody waits for any more, the question having been asked twice
over a connection that broke, is ignored: its place may hold the next gradient by then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline import private_files
from paceline.core.messages import Parameters, Pull, Push
from paceline.errors import printable
from paceline.runtime.live.messaging.remote_links import KeyPair, RemoteLink
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.coded_messages import CodedParameters, RemoteAnswer, decode_remote_answer
from paceline.runtime.live.protocol.configuration import Endpoint
from paceline.runtime.live.protocol.envelope import unwrap, wrap
from paceline.runtime.live.worker.coded_parameters import KnownParameters
from paceline.runtime.live.worker.early_frames import EarlyFrameSender
from paceline.runtime.live.worker.outgoing_frames import Frame, RemotePayload
from paceline.tensors import wire_precision
from paceline.tensors.assignment import Ranges
from paceline.tensors.wire_codecs import WrongFrames

logger = logging.getLogger(__name__)

LINES = 3
"""How often it is logged that a message was refused."""
NOTHING = -1
"""Before the first iteration."""
RECONNECT_S = 0.3
"""How long a broken connection is left alone before it is tried again."""


class RemoteServerLink:
    """A link to one server on another host, and its part of the worker's memory."""

    def __init__(
        self, endpoint: Endpoint, name: bytes, run: str, keys: KeyPair | None, payload: RemotePayload, folder: Path
    ) -> None:
        in_place = self.place_answer if payload.is_exact else None
        self.link = RemoteLink(
            endpoint.address, name, keys, endpoint.key, place_frames=in_place, threaded=payload.leaves_early
        )
        self.run = run
        self.incarnation = endpoint.incarnation
        self.payload = payload
        self.folder = folder
        self.awaited = NOTHING
        """The iteration that was asked for and is not answered yet."""
        self.fetching = ""
        """The file of the run's folder in which this worker wants the optimizer's state."""
        self.is_placed = False
        """Whether the awaited answer is being read, or was, straight into the segment."""
        self.refused = 0
        """How many messages made no sense."""
        self.reconnected_s = 0.0

    @property
    def gone(self) -> bool:
        return self.link.gone

    def assign(self, part: Ranges) -> None:
        payload = self.payload
        self.ranges = payload.frame_ranges(part)
        self.places = [payload.parameters[start:stop] for start, stop in self.ranges]
        """Where the frames of the parameters belong, and their memory."""
        self.memory = wire_precision.memory_of(self.places)
        self.outgoing = payload.outgoing(part, self.ranges)
        self.coded = None if payload.codec is None else KnownParameters(payload.codec, self.places)

    def reconnect(self) -> bool:
        """Somebody may be there although the connection broke."""
        if time.monotonic() - self.reconnected_s <= RECONNECT_S:
            return False
        self.reconnected_s = time.monotonic()
        self.reopen()
        return True

    def reopen(self) -> None:
        self.link.reopen()
        self.is_placed = False

    def send(self, request: wire.Exchange | wire.Fetch) -> None:
        """Sends a request, with the gradient behind it if it pushes one."""
        frames: Sequence[Frame] = ()
        if isinstance(request, wire.Fetch):
            self.fetching = request.file
        else:
            for part in request.messages:
                if isinstance(part, Pull):
                    self.awaited, self.is_placed = part.iteration, False
                elif not request.refusal:
                    frames = self.outgoing.of(part.handle)
            if self.coded is not None:
                request = msgspec.structs.replace(request, held=self.coded.number)
        self.link.send(*self.wrapped(request, frames))

    def wrapped(
        self, request: wire.Exchange | wire.Fetch | wire.Commit, frames: Sequence[Frame]
    ) -> tuple[bytes, Sequence[Frame]]:
        return wrap(self.run, self.incarnation, wire.encode(request)), frames

    def place_answer(self, message: bytes, lengths: Sequence[int]) -> Sequence[memoryview] | None:
        """Returns where the frames behind this message belong, if it is the answer that is awaited; once."""
        if self.is_placed or list(lengths) != [len(place) for place in self.memory]:
            return None
        try:
            answer = self.opened(message)
        except wire.BAD_MESSAGE:
            return None
        self.is_placed = isinstance(answer, Parameters)
        return self.memory if self.is_placed else None

    def opened(self, message: bytes) -> RemoteAnswer | None:
        """Returns what is in this envelope, if it is for this worker and awaited."""
        envelope = unwrap(message)
        if (envelope.run, envelope.incarnation) != (self.run, self.incarnation):
            return None
        opened: RemoteAnswer = decode_remote_answer(envelope.message)
        if isinstance(opened, wire.Fetched):
            return opened if opened.file == self.fetching else None
        parameters = opened.parameters if isinstance(opened, CodedParameters) else opened
        return opened if self.awaited != NOTHING and parameters.iteration >= self.awaited else None

    def receive(self, timeout_s: float) -> Parameters | wire.Fetched | None:
        received = self.link.wait_for(timeout_s)
        if received is None:
            return None
        message, frames = received
        try:
            opened = self.opened(message)
            if isinstance(opened, CodedParameters):
                opened = self.decode(opened, frames)
            elif isinstance(opened, Parameters) and not self.is_placed:
                wire_precision.fill(self.places, frames, self.payload.layout.torch_dtype)
            if isinstance(opened, Parameters):
                self.awaited = NOTHING
            elif opened is not None and not opened.error:
                with open(self.folder / self.fetching, "wb", opener=private_files.opener) as file:
                    file.writelines(frames)
        except (*wire.BAD_MESSAGE, WrongFrames) as error:
            self.refused += 1
            if self.refused <= LINES:
                logger.warning(printable(f"refused what {self.link.address} sent: {error}"))
            self.link.disconnect()  # what was said and is not answered is said again
            return None
        return opened

    def decode(self, answer: CodedParameters, frames: Sequence[memoryview]) -> Parameters:
        """Writes parameters that came in a code into the segment."""
        if self.coded is None:
            raise WrongFrames("the parameters are in a code, and were to come as they are")
        self.coded.take(answer, frames)
        return answer.parameters

    def close(self) -> None:
        self.link.close()


class EarlyServerLink(RemoteServerLink):
    """A link over which frames of the gradient leave while backward computes the others."""

    answered = NOTHING
    """The iteration of the last answer over this connection: no other's gradient leaves early."""

    def assign(self, part: Ranges) -> None:
        super().assign(part)
        self.early = EarlyFrameSender(self.payload.layout, self.ranges, self.payload.attempts)

    def reopen(self) -> None:
        super().reopen()
        self.answered = NOTHING
        self.early.begin()

    def stage(self, index: int) -> None:
        """Sends the frames that are whole now that this tensor's gradient is in its place."""
        if self.answered != NOTHING and self.awaited == NOTHING:
            for number in self.early.stage(index):
                staged = wire.encode(wire.Staged(self.answered, self.early.attempt, number))
                self.link.send(
                    wrap(self.run, self.incarnation, staged), [self.outgoing.frames[number]], may_change=True
                )

    def begin_attempt(self) -> None:
        self.early.begin()

    def end_attempt(self, changed: Sequence[int]) -> None:
        self.early.end(changed)

    def wrapped(
        self, request: wire.Exchange | wire.Fetch | wire.Commit, frames: Sequence[Frame]
    ) -> tuple[bytes, Sequence[Frame]]:
        """Has a push that has left in part be sent as what is left of it."""
        if isinstance(request, wire.Exchange) and any(isinstance(part, Push) for part in request.messages):
            request, frames = self.early.complete(request, frames) or (request, frames)
        return super().wrapped(request, frames)

    def receive(self, timeout_s: float) -> Parameters | wire.Fetched | None:
        received = super().receive(timeout_s)
        if isinstance(received, Parameters):
            self.answered = received.iteration
        return received
