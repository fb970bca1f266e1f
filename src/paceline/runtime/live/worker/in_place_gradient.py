"""Gradients in a segment on the device of the model.

When the script steps, gradients that backward has made elsewhere are copied into the segment, and each tensor's
gradient is a view of it from then on: there are never two whole gradients beside the activations of a forward. A
script that keeps them (`zero_grad(set_to_none=False)`) has backward add to them in place, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class InPlaceGradient:
    """Has the gradients of `tensors` be `views` of a segment."""

    def __init__(self, segment: Tensor, tensors: Sequence[Tensor], views: Sequence[Tensor]) -> None:
        self.segment = segment
        self.tensors = tensors
        self.views = views
        self.places = [view.data_ptr() for view in views]

    def begin(self) -> None:
        """Nothing has to be prepared."""

    def write(self, gradients: Sequence[Tensor | None]) -> bool:
        """Returns when the device has computed the gradient; whether it is finite."""
        absent, views, elsewhere = [], [], []
        for index, (gradient, place) in enumerate(zip(gradients, self.places, strict=True)):
            if gradient is None:
                absent.append(self.views[index])
            elif gradient.data_ptr() != place:
                views.append(self.views[index])
                elsewhere.append(gradient)
                self.tensors[index].grad = self.views[index]
        if elsewhere:
            torch._foreach_copy_(views, elsewhere)
        if absent:
            torch._foreach_zero_(absent)
        return not len(self.segment) or bool(torch.linalg.vector_norm(self.segment, torch.inf).isfinite())

    def forget(self) -> None:
        """The next backward begins with what the script leaves of the gradients."""

    def release(self) -> None:
        """The segment keeps the gradient until the next step."""
