"""A server that steps its parameters in the memory of a device: whether it can, and how workers' memory looks from it.

A worker whose model is on the same device has its segments there, and nothing is copied between the two but what a
policy demands. Memory that is elsewhere (a model on the CPU, or on another device) is copied here and back. Whatever
the device was given is done before a worker is answered.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.messages import Parameters
from paceline.errors import PacelineError
from paceline.runtime.live.messaging.senders import Process
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.server.worker_buffer import (
    NONE,
    ParameterCopy,
    Reply,
    SeparateBuffer,
    SharedParameters,
    WorkerBuffer,
    ranges_of,
)
from paceline.runtime.live.storage import device_segments, shared_memory
from paceline.runtime.live.storage.device_segments import MemoryDevice
from paceline.tensors.assignment import Ranges, size
from paceline.tensors.device_optimizer import DeviceOptimizer
from paceline.tensors.layout import Layout

VECTORS = 5
"""A server's own vectors, at most usually: parameters, two of state, a sum of gradients, a moving average."""


def find_device(order: wire.Configure, folder: Path, shard: int, workers: int) -> tuple[MemoryDevice | None, str]:
    """Returns the device that this server is to step on, or None and why it cannot. One that is restarted must."""
    if not order.step_on.name:
        return None, ""
    try:
        device = device_segments.device_named(order.step_on.name)
        if order.step_on.probe:
            device_segments.check_probe(folder / order.step_on.probe)
        _check_room(device, order.layout, size(order.assignment[shard]), workers)
    except (PacelineError, OSError, RuntimeError) as problem:
        if order.epoch_s is not None:
            raise PacelineError(f"server {shard} cannot go on in the memory of the device: {problem}") from None
        return None, str(problem).splitlines()[0]
    return device, ""


def _check_room(device: MemoryDevice, layout: Layout, numel: int, workers: int) -> None:
    """Refuses a device without room for the server, and for the gradients and parameters of all workers."""
    needed = layout.itemsize * (VECTORS * numel + 2 * workers * layout.numel)
    free = device.free_bytes()
    if free < needed:
        raise PacelineError(f"{free / 1e9:.2f} GB are free on the device, {needed / 1e9:.2f} GB are needed")


class CopiedBuffer(SeparateBuffer):
    """A gradient in memory where the device does not step: it is copied when it has come."""

    def __init__(
        self, there: Tensor, here: Tensor, part: Ranges, optimizer: DeviceOptimizer, parameters: SharedParameters,
        reply: Reply,
    ) -> None:  # fmt: skip
        WorkerBuffer.__init__(self, parameters, reply)
        self.arrived = ranges_of(there, part)
        self.copies = here.split([len(each) for each in self.arrived])
        self.gradient = optimizer.cut(here)

    def begin_push(self, absent: frozenset[int]) -> None:
        super().begin_push(absent)
        self.parameters.version = NONE  # which the gradient may have replaced
        for copy, arrived in zip(self.copies, self.arrived, strict=True):
            copy.copy_(arrived)


def open_buffer(
    folder: Path, layout: Layout, part: Ranges, optimizer: DeviceOptimizer, device: MemoryDevice, process: Process,
    reply: Reply,
) -> WorkerBuffer:  # fmt: skip
    """Returns this part of a worker's memory, wherever that is."""
    reply = after(device.settle, reply)
    own, staging = shared_memory.segment_path(folder, *process), shared_memory.staging_path(folder, *process)
    parameters, whole = SharedParameters(), None
    if own.exists():  # else it reads them where they are stepped
        whole = device_segments.attach(own, layout)
        parameters = ParameterCopy(whole, part, optimizer)
    vector = device_segments.attach(staging, layout) if whole is None or staging.exists() else whole
    if vector.device == device.place:
        return SeparateBuffer(vector, part, optimizer, parameters, reply)
    here = torch.empty(size(part), dtype=layout.torch_dtype, device=device.place)
    return CopiedBuffer(vector, here, part, optimizer, parameters, reply)


def after(settle: Callable[[], None], reply: Reply) -> Reply:
    """Returns a `reply` that waits for the device first."""

    def settled(parameters: Parameters) -> None:
        settle()
        reply(parameters)

    return settled
