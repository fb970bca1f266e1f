"""The interfaces of a worker's data path: how its gradient gets to the servers, and their parameters into its model.

Each way is a class in a file of its own, and `worker/worker_memory.py` chooses among them when the worker starts and
when servers change. A step only calls what was chosen.

    gradients     copied_gradient     copied into shared memory when the script steps
                  staged_gradient     copied while backward runs, tensor by tensor (`overlap=True`)
                  gathered_gradient   sent from the tensors themselves, if all servers are on other hosts
    parameters    parameter_views     the model's tensors are views of memory that the servers write
                  pinned_memory       they are copied to the model, which is on a GPU
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from paceline.runtime.live.worker.host_copies import HostCopies
from paceline.runtime.live.worker.stream_copies import StreamCopies

GradientCopies = HostCopies | StreamCopies
"""Copies gradients into a segment and looks for NaN and Inf, on the devices where the model is."""


class GradientPath(Protocol):
    """Takes a whole gradient to where the servers, or the links to them, read it."""

    def begin(self) -> None:
        """The model has its first parameters, and the script begins to train."""

    @property
    def write(self) -> Callable[[Sequence[Tensor | None]], bool]:
        """Returns when the gradient can be pushed; whether it is finite."""

    def forget(self) -> None:
        """The gradients that backward has left so far will not be pushed."""

    def release(self) -> None:
        """Every server has the gradient, or will be sent it from the segment."""


class ParameterPath(Protocol):
    """Gets the parameters that the servers have answered into the model."""

    @property
    def load(self) -> Callable[[], None]:
        """Has the model hold the newest parameters."""

    def first_moved(self) -> int | None:
        """Returns the first tensor that the script has given other memory."""

    @property
    def close(self) -> Callable[[], None]:
        """Stops loading; tensors that the script still holds stay valid."""


class EarlySending(Protocol):
    """Sends frames of a gradient to one server while backward computes the others."""

    def stage(self, index: int) -> None:
        """The gradient of this tensor is in its place."""

    def begin_attempt(self) -> None:
        """What was staged so far will not be pushed, or is about to change."""

    def end_attempt(self, changed: Sequence[int]) -> None:
        """The whole gradient will be pushed; these tensors' is not what was staged."""
