"""What a workload is: a model, a loss, training and test data, and how to start.

The loss is the mean over the batch, so the mean of the workers' gradients is the gradient of the joined batch.
Data are two tensors (inputs, targets) with as many rows; a map-style `torch.utils.data.Dataset` of such pairs is
stacked into them once. Integer inputs stay integers (a user and a film, the words of a text), floating ones take the
run's dtype.

`own` reads a workload out of a user's Python file: a `Workload`, a function that makes one, or any class with
`make_module`, `loss` and `train` (and, if it likes, `test`, `batch`, `optimizer`, `metrics`).
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from paceline import user_code
from paceline.errors import ConfigError

Loss = Callable[[Tensor, Tensor], Tensor]
Data = tuple[Tensor, Tensor]
METRICS = ("loss", "accuracy")
OPTIONAL = ("test", "batch", "optimizer", "metrics", "data")
NEEDED = ("make_module", "loss", "train")


@dataclass(frozen=True)
class Workload:
    name: str
    make_module: Callable[[], nn.Module]
    """Makes a fresh model; the caller seeds torch before."""
    loss: Loss
    train: Data
    test: Data
    batch: int = 32
    """Samples per worker and iteration."""
    optimizer: str = "sgd:lr=0.1"
    """The default optimizer, as text."""
    metrics: tuple[str, ...] = METRICS
    data: str = ""
    """Where the data came from, for the results, if that may vary."""

    def module(self, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_module().to(dtype)

    def on(self, device: torch.device) -> Workload:
        """Returns the workload with its data in the memory of this device, and what its loss holds, if that is a
        module."""
        if device.type == "cpu":
            return self
        train, test = ((moved(x, device), moved(y, device)) for x, y in (self.train, self.test))
        loss = deepcopy(self.loss).to(device) if isinstance(self.loss, nn.Module) else self.loss
        return replace(self, train=train, test=test, loss=loss)

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Returns the loss on the test set, and the accuracy where there are classes."""
        dtype = next(module.parameters()).dtype
        x, y = (in_dtype(tensor, dtype) for tensor in self.test)
        training = module.training
        module.eval()
        with torch.no_grad():
            output = module(x)
            measured = {"loss": self.loss(output, y).item()}
            if "accuracy" in self.metrics:
                measured["accuracy"] = (output.argmax(1) == y).float().mean().item()
        module.train(training)
        return measured


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts floating values to the run's dtype; whole numbers are labels or indices and stay as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device; one whose elements share memory, as windows of a text do, shares it there too."""
    held = tensor.untyped_storage().nbytes() // tensor.element_size()
    if held >= tensor.numel():
        return tensor.to(device)
    flat = tensor.as_strided((held,), (1,), 0).to(device)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def own(text: str) -> Workload:
    """Makes the workload that FILE.py:NAME names."""
    found = user_code.load(text, "workload")
    path = Path(text.rpartition(":")[0])
    try:
        made = found() if callable(found) and not isinstance(found, Workload) else found
        workload = made if isinstance(made, Workload) else assemble(made, text)
        check(workload, text)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(user_code.describe(error, path)) from None
    return workload


def assemble(parts: Any, text: str) -> Workload:
    """Makes a workload from an object with the parts as attributes."""
    missing = [name for name in NEEDED if not hasattr(parts, name)]
    if missing:
        raise ConfigError(
            f"{text} is no workload: it lacks {', '.join(missing)} (needed: {', '.join(NEEDED)}; "
            f"may have: {', '.join(OPTIONAL)})"
        )
    train = stacked(parts.train, f"{text}: train")
    optional = {name: getattr(parts, name) for name in OPTIONAL if name != "test" and hasattr(parts, name)}
    if "metrics" not in optional:
        optional["metrics"] = METRICS if are_classes(train[1]) else ("loss",)
    optional["metrics"] = tuple(optional["metrics"])
    test = stacked(parts.test, f"{text}: test") if hasattr(parts, "test") else train
    return Workload(text, parts.make_module, parts.loss, train, test, **optional)


def are_classes(targets: Tensor) -> bool:
    """Whether the targets are classes, one whole number for each sample, which an output's largest element predicts."""
    return targets.dim() == 1 and not targets.is_floating_point()


def stacked(data: Any, label: str) -> Data:
    """Returns (inputs, targets) from such a pair, or from a dataset of pairs."""
    if isinstance(data, Dataset):
        if not isinstance(data, Sized):
            raise ConfigError(f"{label}: a dataset must know its length and be read by index")
        data = default_collate([data[index] for index in range(len(data))])
    pair = tuple(data) if isinstance(data, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(tensor, Tensor) for tensor in pair):
        raise ConfigError(f"{label} must be a pair of tensors (inputs, targets) or a dataset of such pairs")
    inputs, targets = pair
    if inputs.dim() == 0 or targets.dim() == 0 or len(inputs) != len(targets) or not len(inputs):
        sizes = [tuple(tensor.shape) for tensor in pair]
        raise ConfigError(f"{label} must have as many inputs as targets, and at least one, got shapes {sizes}")
    return inputs, targets


def check(workload: Workload, text: str) -> None:
    """Computes one loss and evaluates once, so that errors appear before anything starts."""
    for name, data in (("train", workload.train), ("test", workload.test)):
        stacked(data, f"{text}: {name}")
    if not isinstance(workload.batch, int) or isinstance(workload.batch, bool):
        raise ConfigError(f"{text}: batch={workload.batch!r} is not a whole number")
    if not 1 <= workload.batch <= len(workload.train[0]):
        raise ConfigError(f"{text}: batch={workload.batch} is out of range: 1 to {len(workload.train[0])}, all samples")
    if not set(workload.metrics) <= set(METRICS) or "loss" not in workload.metrics:
        raise ConfigError(f"{text}: metrics={workload.metrics} must be ('loss',) or {METRICS}")
    module = workload.module(0)
    if not isinstance(module, nn.Module) or not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"{text}: make_module() must give a torch.nn.Module with something to train")
    x, y = (in_dtype(tensor[: workload.batch], torch.float32) for tensor in workload.train)
    loss = workload.loss(module(x), y)
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.requires_grad:
        raise ConfigError(f"{text}: loss(output, target) must give the mean over the batch, one number with a gradient")
    few = (workload.test[0][: workload.batch], workload.test[1][: workload.batch])
    try:
        replace(workload, test=few).evaluate(module)
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{text}: evaluating on the test set failed: {type(error).__name__}: {said}") from None
