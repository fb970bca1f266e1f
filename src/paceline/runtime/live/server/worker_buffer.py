"""A worker's gradient, and where its parameters go, as one server sees them.

Which kind it is depends on the worker, and is chosen once, when the server first hears it:

    SegmentBuffer   gradient and parameters in the same memory, the worker's segment: the usual way on one host
    SeparateBuffer  the gradient in memory of its own, as with `overlap=True`
    SpareBuffer     the same, and the server may use that memory
    FrameBuffer     the gradient in the frames in which it came from another host (`server/remote_memory.py`)

and the parameters are written into memory of the worker's (`ParameterCopy`), or not at all, if they are read where they
are stepped (`SharedParameters`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

from torch import Tensor

from paceline.core.messages import Parameters
from paceline.runtime.live.storage.update_log import raw
from paceline.tensors.assignment import Ranges
from paceline.tensors.shard_optimizer import SlicedGradient

Reply = Callable[[Parameters], None]
NONE = -1
"""The version of memory that holds no parameters."""


class Cut(Protocol):
    """An optimizer that has its slice in pieces."""

    def cut_from(self, whole: Tensor) -> SlicedGradient:
        """Cuts the pieces of the slice out of a vector over all parameters."""


class SharedParameters:
    """Parameters that are read in the server's own memory, or sent from there: nothing is written."""

    targets: Sequence[Sequence[Tensor]] = ()
    """Where a step writes new values, in the optimizer's pieces."""
    version = NONE

    def write_back(self, values: Tensor, version: int) -> None:
        """Sees to it that the worker finds these values."""


class ParameterCopy(SharedParameters):
    """A worker's own copy of this server's part of the parameters."""

    def __init__(self, whole: Tensor, part: Ranges, optimizer: Cut) -> None:
        self.ranges = ranges_of(whole, part)
        self.targets = (optimizer.cut_from(whole),)

    def write_back(self, values: Tensor, version: int) -> None:
        if self.version != version:
            scatter(values, self.ranges)
            self.version = version


class WorkerBuffer:
    """What one server has of one worker."""

    may_overwrite = False
    """Whether a step may use the gradient's memory for its own sums."""
    gradient: Sequence[Tensor]
    """The gradient of the last push, in the optimizer's pieces."""
    ranges: Sequence[Tensor] = ()
    """The same in the order of the slice."""

    def __init__(self, parameters: SharedParameters, reply: Reply) -> None:
        self.parameters = parameters
        self.reply = reply
        """Tells the worker that its parameters are there."""
        self.absent: frozenset[int] = frozenset()
        """Tensors that have no gradient in the last push."""

    def begin_push(self, absent: frozenset[int]) -> None:
        """A gradient has come."""
        self.absent = absent

    @cached_property
    def gradient_bytes(self) -> list[memoryview]:
        """The memory of the gradient, in the order of the slice."""
        return [raw(each) for each in self.ranges]

    def keep(self) -> Sequence[Tensor]:
        """Returns the gradient for later: its worker goes on, and the memory is the worker's again."""
        return [piece.clone() for piece in self.gradient]

    def release(self) -> None:
        """The worker is answered: its gradient is used, dropped, or kept."""


class SeparateBuffer(WorkerBuffer):
    """A gradient in a vector that parameters are not written to."""

    def __init__(
        self, vector: Tensor, part: Ranges, optimizer: Cut, parameters: SharedParameters, reply: Reply
    ) -> None:
        super().__init__(parameters, reply)
        self.ranges = ranges_of(vector, part)
        self.gradient = optimizer.cut_from(vector)


class SpareBuffer(SeparateBuffer):
    """A gradient in a vector that nobody reads again."""

    may_overwrite = True


class SegmentBuffer(WorkerBuffer):
    """A gradient and parameters in the same vector: new values replace the gradient that they were stepped with."""

    may_overwrite = True
    gradient: SlicedGradient

    def __init__(self, vector: Tensor, part: Ranges, optimizer: Cut, reply: Reply) -> None:
        copy = ParameterCopy(vector, part, optimizer)
        super().__init__(copy, reply)
        self.ranges = copy.ranges
        self.gradient = optimizer.cut_from(vector)

    def begin_push(self, absent: frozenset[int]) -> None:
        self.absent = absent
        self.parameters.version = NONE


def ranges_of(whole: Tensor, part: Ranges) -> list[Tensor]:
    return [whole[start:stop] for start, stop in part]


def scatter(values: Tensor, ranges: Sequence[Tensor]) -> None:
    """Writes the values of a slice into its ranges."""
    for there, mine in zip(ranges, values.split([len(each) for each in ranges]), strict=True):
        there.copy_(mine)
