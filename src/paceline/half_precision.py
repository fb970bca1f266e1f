"""Parameters in bfloat16 or float16: a run knows a float32 master of each, and the model has it rounded.

A worker's gradients are widened before they are pushed, and what the servers answer is rounded into the model. So no
step is lost that is smaller than a half can say, and the run's own model, its checkpoints and the optimizer's state are
in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import PacelineError

HALVES = (torch.bfloat16, torch.float16)


def need_masters(tensors: Sequence[Tensor]) -> bool:
    """Returns whether these are parameters in half precision, or in both that and float32."""
    kinds = {tensor.dtype for tensor in tensors}
    return bool(kinds & set(HALVES)) and kinds <= {*HALVES, torch.float32}


class Masters:
    """The float32 masters of a model's parameters."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.masters = [tensor.detach().to(torch.float32, copy=True) for tensor in tensors]
        self.seen: list[tuple[int, int]] = []

    @torch.no_grad()
    def round(self) -> None:
        """Writes the masters into the model."""
        torch._foreach_copy_(self.tensors, self.masters)
        self.seen = self._marks()

    def check(self) -> None:
        """Refuses a script that has changed a parameter: the next answer would undo that in silence."""
        if self.seen != self._marks():
            raise PacelineError(
                "a parameter was changed by the script: once wrapped, parameters belong to the servers; load or change "
                "them before paceline.Optimizer is made"
            )

    def _marks(self) -> list[tuple[int, int]]:
        return [(tensor.data_ptr(), tensor._version) for tensor in self.tensors]


def widened(gradient: Tensor | None) -> Tensor | None:
    """Returns a gradient in float32."""
    return None if gradient is None else gradient.to(torch.float32)
