"""What a workload is: a model, a loss, training and test data, and how to start.

The loss is the mean over the batch, so the mean of the workers' gradients is the gradient of the joined batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    name: str
    make_module: Callable[[], nn.Module]
    """A fresh model; the caller seeds torch before."""
    loss: Loss
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    batch: int
    """Samples per worker and iteration."""
    optimizer: str
    """The default optimizer, as text."""
    metrics: tuple[str, ...] = ("loss", "accuracy")

    def module(self, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_module().to(dtype)

    def evaluate(self, module: nn.Module) -> dict[str, float | None]:
        """Loss and accuracy on the test set; accuracy is None where there are no classes."""
        x, y = self.test
        x = x.to(next(module.parameters()).dtype)
        with torch.no_grad():
            output = module(x)
            loss = self.loss(output, y.to(output.dtype) if y.is_floating_point() else y).item()
            accuracy = (output.argmax(1) == y).float().mean().item() if "accuracy" in self.metrics else None
        return {"loss": loss, "accuracy": accuracy}
