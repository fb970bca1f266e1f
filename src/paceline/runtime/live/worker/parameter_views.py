"""Models on the CPU whose tensors are views of the memory in which they get their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from paceline.runtime.live.worker.shared_parameters_view import SharedParametersView
from paceline.tensors.layout import Layout


class OwnParameters:
    """The model is views of the worker's own segment: what the servers write there is in the model, without a copy."""

    def __init__(self, segment: Tensor, layout: Layout, tensors: Sequence[Tensor], takes_along: bool) -> None:
        """With `takes_along` the model keeps its values; else the segment has a gradient, until it is answered."""
        self.tensors = tensors
        self.addresses = adopt(tensors, layout.views(segment), takes_along)

    def load(self) -> None:
        """Nothing has to be done."""

    def first_moved(self) -> int | None:
        return find_moved(self.tensors, self.addresses)

    def close(self) -> None:
        """The segment is kept by the tensors that are views of it."""


class SharedParameters:
    """The model is views of the one vector that the server steps, through a private mapping."""

    def __init__(self, path: Path, layout: Layout, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.view = SharedParametersView(path, layout)
        self.load = self.view.refresh
        self.close = self.view.close
        self.addresses = adopt(tensors, layout.views(self.view.vector), takes_along=False)

    def first_moved(self) -> int | None:
        return find_moved(self.tensors, self.addresses)


def adopt(tensors: Sequence[Tensor], views: Sequence[Tensor], takes_along: bool) -> list[int]:
    """Makes the tensors views of other memory; their addresses there."""
    for tensor, view in zip(tensors, views, strict=True):
        if takes_along:
            view.copy_(tensor.detach())
        tensor.data = view
    return [view.data_ptr() for view in views]


def find_moved(tensors: Sequence[Tensor], addresses: Sequence[int]) -> int | None:
    for index, tensor in enumerate(tensors):
        if tensor.data_ptr() != addresses[index]:
            return index
    return None
