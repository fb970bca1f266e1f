"""The memory of a worker whose model is on the device where its servers step.

Gradient and parameters are segments of that device, of which the model is views: nothing leaves the device. Under BSP
the parameters are the one vector that the server steps; it is mapped for reading only, so that no script can change the
parameters of all others: writing to a parameter is then a fault of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from paceline.runtime.live.storage import device_segments, shared_memory
from paceline.runtime.live.storage.device_segments import DeviceSegments, MemoryDevice
from paceline.runtime.live.worker.data_path import ParameterPath
from paceline.runtime.live.worker.in_place_gradient import InPlaceGradient
from paceline.runtime.live.worker.parameter_views import OwnParameters
from paceline.runtime.live.worker.worker_memory import WorkerMemory
from paceline.tensors.layout import Layout


class SharedDeviceMemory(WorkerMemory):
    """A worker's segments on a device."""

    def __init__(
        self,
        folder: Path,
        process: tuple[int, int],
        layout: Layout,
        tensors: Sequence[Tensor],
        device: MemoryDevice,
        segments: DeviceSegments,
        common: bool,
    ) -> None:
        """`common` says whether the parameters are read where the server steps them."""
        super().__init__(folder, layout, tensors)
        self.device = device
        self.device_name = device.name
        self.segments = segments
        self.own_path = shared_memory.segment_path(folder, *process)
        self.gradient = segments.create(shared_memory.staging_path(folder, *process), layout, device)
        self.path = self.from_segment = InPlaceGradient(self.gradient, tensors, layout.views(self.gradient))
        self.is_common = common
        if common:
            self.parameters = self.common_parameters(folder / shared_memory.COMMON)
        else:
            self.parameters = self.own_parameters()

    def own_parameters(self) -> ParameterPath:
        self.own = self.segments.create(self.own_path, self.layout, self.device)
        parameters = OwnParameters(self.own, self.layout, self.tensors, takes_along=True)
        self.device.settle()
        return parameters

    def common_parameters(self, path: Path) -> ParameterPath:
        common = device_segments.attach(path, self.layout, writes=False)
        return OwnParameters(common, self.layout, self.tensors, takes_along=False)

    def settle(self) -> None:
        self.device.settle()
