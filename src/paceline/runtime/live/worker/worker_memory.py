"""The memory that a worker shares with servers, and the ways its gradients leave and its parameters come.

The ways (`worker/data_path.py`) of a model on the CPU are chosen here: when the worker starts, and when its servers
change. Such a model is views of the worker's segment, or of the vector that the one server steps for all
(`Endpoint.common`); then the segment has gradients only. Gradients that come while backward still reads the model
(`overlap=True`) have a segment of their own. A model on a GPU is copied from and to (`worker/pinned_memory.py`), or
shared on the device (`worker/shared_device_memory.py`).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from paceline.runtime.live.storage import shared_memory
from paceline.runtime.live.worker.copied_gradient import CopiedGradient
from paceline.runtime.live.worker.data_path import EarlySending, GradientCopies, GradientPath, ParameterPath
from paceline.runtime.live.worker.gathered_gradient import GatheredGradient
from paceline.runtime.live.worker.host_copies import HostCopies, write_slice
from paceline.runtime.live.worker.parameter_views import OwnParameters, SharedParameters
from paceline.runtime.live.worker.staged_gradient import StagedGradient
from paceline.tensors.assignment import Ranges
from paceline.tensors.layout import Layout


class WorkerMemory(ABC):
    """One worker's shared memory, and the gradient that is in it or on its way."""

    parameters: ParameterPath
    gradient: Tensor
    """The segment for gradients, which may be the one for parameters."""
    path: GradientPath
    from_segment: GradientPath
    """The gradient path through the segment, taken whenever some server is on this host; else `gathered` is."""
    gathered: GatheredGradient | None = None

    device_name = ""
    """The device on which its segments are; "" in shared memory."""
    own: Tensor
    """The segment that servers write parameters to, unless all workers read them in one place."""

    def __init__(self, folder: Path, layout: Layout, tensors: Sequence[Tensor]) -> None:
        self.folder = folder
        self.layout = layout
        self.tensors = tensors
        self.is_common = False
        """Whether the parameters are read where the server steps them."""
        self.early: list[EarlySending] = []
        """Links to other hosts that send what backward has staged."""
        self.written: Sequence[Tensor | None] = ()
        """The gradient that was written last, until it is answered."""
        self.is_pushed = False
        """Whether servers may have seen that gradient."""
        self.versions: list[int] = []
        """How often each tensor had been written to when its parameters came."""

    def begin(self) -> None:
        """The first parameters are in the model: from now on the script must not change them."""
        self.versions = [tensor._version for tensor in self.tensors]
        self.path.begin()

    # One step.

    def write(self, gradients: Sequence[Tensor | None]) -> bool:
        """Returns when the gradient can be pushed; whether it is finite."""
        self.written, self.is_pushed = gradients, False
        return self.path.write(gradients)

    def commit(self) -> None:
        """The gradient is about to be pushed: from now on the memory belongs to the servers."""
        self.settle()
        self.is_pushed = True

    def load(self) -> None:
        """The servers have answered: has the model hold the newest parameters."""
        self.parameters.load()

    def release(self) -> None:
        """Every server has the gradient."""
        self.written = ()
        self.path.release()

    def restore(self, part: Ranges) -> None:
        """Writes a server's part of the gradient again: one that is gone may have written over half of it."""
        if self.written:
            write_slice(self.written, self.gradient, self.layout, part)

    def forget(self) -> None:
        """What backward has staged so far will not be pushed."""
        self.path.forget()

    def first_changed(self) -> int | None:
        """Returns the first tensor that the script has changed, or given other memory, since its parameters came."""
        for index, tensor in enumerate(self.tensors):
            if tensor._version != self.versions[index]:
                return index
        return self.parameters.first_moved()

    # How it is done.

    def follow(self, common: bool, gathers: bool, early: Sequence[EarlySending]) -> None:
        """Chooses how gradients and parameters travel from now on: servers are new, or elsewhere.

        `common` says whether they step the parameters where all can read them, `gathers` whether each can be sent what
        lies in several places. The links in `early` send what is staged.
        """
        self.early[:] = early
        if common:
            self.read_common()
        else:
            self.read_own()
        before = self.path
        self.path = self.gathered if gathers and self.gathered is not None else self.from_segment
        if self.path is not before:
            before.release()
            if self.written and not self.is_pushed:
                self.path.write(self.written)

    def read_common(self) -> None:
        """Has the model read the parameters where the server steps them."""
        # The server that said so may be gone by now, and its segment: then the next one says something else.
        with contextlib.suppress(FileNotFoundError):
            if not self.is_common:
                self._read(self.common_parameters(self.folder / shared_memory.COMMON))
                self.is_common = True

    def read_own(self) -> None:
        """Has the model read the parameters in the worker's own segment."""
        if self.is_common:
            self._read(self.own_parameters())
            self.is_common = False

    def _read(self, parameters: ParameterPath) -> None:
        self.parameters.close()
        self.parameters = parameters

    @abstractmethod
    def own_parameters(self) -> ParameterPath:
        """Returns the way of parameters that come to the worker's own segment."""

    @abstractmethod
    def common_parameters(self, path: Path) -> ParameterPath:
        """Returns the way of parameters that a server steps in this file."""

    @abstractmethod
    def settle(self) -> None:
        """Returns when nothing is being copied or computed in this memory."""

    def close(self) -> None:
        self.settle()
        self.parameters.close()


class HostMemory(WorkerMemory):
    """The memory of a worker whose model is on the CPU."""

    copies: GradientCopies

    def __init__(
        self, folder: Path, process: tuple[int, int], layout: Layout, tensors: Sequence[Tensor], overlap: bool
    ) -> None:
        super().__init__(folder, layout, tensors)
        self.own = shared_memory.create(shared_memory.segment_path(folder, *process), layout)
        if overlap:
            self.gradient = shared_memory.create(shared_memory.staging_path(folder, *process), layout)
            self.copies = HostCopies(layout.views(self.gradient))
            self.from_segment = StagedGradient(layout, tensors, self.copies, self.early)
        else:
            self.gradient = self.own
            self.copies = HostCopies(layout.views(self.gradient))
            self.from_segment = CopiedGradient(self.copies)
            self.gathered = GatheredGradient(layout, self.copies)
        self.path = self.from_segment
        self.parameters = self.own_parameters()

    def own_parameters(self) -> ParameterPath:
        # While a gradient is handed in, that is what the segment holds until the answer.
        return OwnParameters(self.own, self.layout, self.tensors, takes_along=not self.written)

    def settle(self) -> None:
        self.copies.settle()

    def common_parameters(self, path: Path) -> ParameterPath:
        return SharedParameters(path, self.layout, self.tensors)
