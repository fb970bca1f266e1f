"""GPUs: copies on a stream beside the computing one, straight between the device and shared memory.

A segment is registered with CUDA (`pin`), so the device reads and writes it by itself: no second buffer, and
the host does not wait until it has to. Where registering fails, the same copies work, only slower.

Nothing here is touched by a run whose models are on the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

AHEAD = 2
"""Places that the host may be ahead of the device under `RunAheadLimit`."""
PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device, not only the current one."""


class CudaCopyStream:
    """A stream of its own on one GPU (see `stream_copies.CopyStream`)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def enqueue(self, work: Callable[[], None], uses: Iterable[Tensor]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            work()
        for tensor in uses:
            tensor.record_stream(self.stream)

    def hold_back(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def join(self) -> None:
        self.stream.synchronize()


def copy_streams_for(tensors: Sequence[Tensor]) -> dict[torch.device, CudaCopyStream]:
    """Returns a stream for each GPU that holds one of the tensors."""
    devices = {tensor.device: None for tensor in tensors if tensor.device.type == "cuda"}
    return {device: CudaCopyStream(device) for device in devices}


def pin(segment: Tensor, device: torch.device) -> str:
    """Registers a segment with CUDA; "" or why that failed."""
    with torch.cuda.device(device):
        code = torch.cuda.cudart().cudaHostRegister(segment.data_ptr(), segment.nbytes, PORTABLE)
        if int(code) == 0:
            return ""
        with suppress(RuntimeError):
            torch.zeros(1, device=device).add_(1)  # CUDA reports the failure once more, to whoever asks next
    return str(torch.cuda.cudart().cudaGetErrorString(code))


def unpin(segment: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(segment.data_ptr())


class RunAheadLimit:
    """Keeps the host from running ahead of a GPU by more than a few layers, so that it can be interrupted.

    Without it the host has given the device a whole iteration within milliseconds, and then there is no hook left
    that could stop anything.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.device = next(tensor.device for tensor in tensors if tensor.device.type == "cuda")
        self.marks: deque[torch.cuda.Event] = deque()

    def keep(self) -> None:
        """Mark this place, and wait until the device has passed the one before the last."""
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self.device))
        self.marks.append(mark)
        if len(self.marks) > AHEAD:
            self.marks.popleft().synchronize()
