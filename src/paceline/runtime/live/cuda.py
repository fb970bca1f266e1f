"""GPUs: copies on a stream beside the computing one, straight between the device and shared memory.

A segment is registered with CUDA (`pin`), so the device reads and writes it by itself: no second buffer, and
the host does not wait until it has to. Where registering fails, the same copies work, only slower.

Nothing here is touched by a run whose models are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device, not only the current one."""


class CudaLane:
    """A stream of its own on one GPU (see `staging.Lane`)."""

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


def lanes_for(tensors: Sequence[Tensor]) -> dict[torch.device, CudaLane]:
    """A lane for each GPU that holds one of the tensors."""
    devices = {tensor.device: None for tensor in tensors if tensor.device.type == "cuda"}
    return {device: CudaLane(device) for device in devices}


def pin(segment: Tensor, device: torch.device) -> str:
    """Register a segment with CUDA; "" or why that failed."""
    with torch.cuda.device(device):
        code = torch.cuda.cudart().cudaHostRegister(segment.data_ptr(), segment.nbytes, PORTABLE)
        if int(code) == 0:
            return ""
        with suppress(RuntimeError):
            torch.zeros(1, device=device).add_(1)  # CUDA reports the failure once more, to whoever asks next
    return str(torch.cuda.cudart().cudaGetErrorString(code))


def unpin(segment: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(segment.data_ptr())
