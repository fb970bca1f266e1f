"""The gradients a server has: in the memory of workers, and copies of those whose worker has gone on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from paceline.core.messages import Handle
from paceline.runtime.live.messaging.senders import Process
from paceline.runtime.live.server.worker_buffer import WorkerBuffer

Gradient = tuple[Sequence[Tensor], frozenset[int]]
"""The optimizer's pieces of a gradient, and the tensors that have none."""


class WorkerBuffers:
    """The buffers of all workers that have said something, mapped when they are needed first."""

    def __init__(self, open_buffer: Callable[[Process], WorkerBuffer]) -> None:
        self.open_buffer = open_buffer
        """Maps or makes a worker's buffer; raises `FileNotFoundError` if the worker is gone."""
        self.members: set[Process] = set()
        """Of the newest view."""
        self.opened: dict[Process, WorkerBuffer] = {}
        self.kept: dict[Handle, Gradient] = {}
        """Gradients that are not used yet although their worker goes on: copies."""

    def of(self, process: Process) -> WorkerBuffer:
        buffer = self.opened.get(process)
        if buffer is None:
            buffer = self.opened[process] = self.open_buffer(process)
        return buffer

    def holding(self, handle: Handle) -> WorkerBuffer:
        """The buffer that has this gradient, of which there is no copy."""
        return self.opened[handle.source, handle.incarnation]

    def pieces(self, handle: Handle) -> Sequence[Tensor]:
        kept = self.kept.get(handle)
        return kept[0] if kept is not None else self.holding(handle).gradient

    def keep(self, process: Process, buffer: WorkerBuffer, held: Iterable[Handle]) -> None:
        """Copies the gradients of a worker that is about to go on, if they wait for their iteration's mean."""
        for handle in held:
            if (handle.source, handle.incarnation) == process and handle not in self.kept:
                self.kept[handle] = (buffer.keep(), buffer.absent)

    def release_departed(self, held: Iterable[Handle]) -> None:
        """Unmaps the buffers of workers that are gone, once their last gradient is used."""
        needed = {(handle.source, handle.incarnation) for handle in held}
        for process in self.opened.keys() - self.members - needed:
            del self.opened[process]
