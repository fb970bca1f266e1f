"""What a worker tells the driver of the device that its model is on: whether processes can share its memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from paceline.errors import PacelineError
from paceline.runtime.live.storage import device_segments
from paceline.runtime.live.storage.device_segments import DeviceSegments, MemoryDevice

PEERS_ON_DEVICES = "on-devices"
"""A file that exists if peers have their parameters in the memory of the devices where their models are."""


def probe_name(rank: int, incarnation: int) -> str:
    """Returns the file of the run's folder with a segment by which servers find out whether they can map others."""
    return f"probe-{rank}.{incarnation}"


class DeviceReport:
    """The device that holds a model, with a segment there for others to try."""

    def __init__(self, tensors: Sequence[Tensor], path: Path, wanted: bool) -> None:
        """Looks at no device unless it is `wanted`."""
        self.segments = DeviceSegments()
        self.path = path
        self.device: MemoryDevice | None = None
        self.problem = ""
        """Why the memory of the device cannot be shared."""
        if not wanted:
            return
        try:
            self.device = device_segments.device_of(tensors)
            if self.device is not None:
                self.segments.create_probe(path, self.device)
        except (PacelineError, OSError, RuntimeError) as problem:
            self.device, self.problem = None, str(problem).splitlines()[0]

    @property
    def name(self) -> str:
        """The name of the device; "" if its memory is not shared."""
        return self.device.name if self.device is not None else ""

    def remove_probe(self) -> None:
        if self.device is not None:
            self.segments.remove(self.path)
