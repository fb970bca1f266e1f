"""Real gradients for virtual workers, computed late and together.

A virtual computation takes no time of its own: when it starts, the parameters it read and the samples it was
dealt are put aside, and its gradient is worked out when a shard first needs it. By then most other workers
have started theirs too, so all outstanding ones are computed in one `torch.func.vmap` call, which for a small
model costs little more than one of them alone. `Batched` does that, `OneByOne` is the plain loop: what cannot be
batched (batch norm in training, recurrent layers, control flow that looks at values) is computed by it. On a GPU there
is a third way, `Replayed` (`cuda_graphs.py`), the first choice for models with convolutions.

Random layers (dropout) draw from a generator seeded by the run and the call, so equal seeds give equal runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.conv import _ConvNd

from paceline.core.messages import Handle
from paceline.errors import PacelineError
from paceline.runtime.virtual.cuda_graphs import Replayed
from paceline.tensors.devices import CPU
from paceline.tensors.layout import Layout
from paceline.workloads.base import Workload, in_dtype

AT_ONCE = 256
TRACED_AT = 30
"""A number of gradients must come up so often before it is traced, which takes a tenth of a second."""
TRACES = 16
"""So many traces are kept at most."""
Key = tuple[int, int, int]
"""(source, incarnation, iteration), the part of a handle that all shards share."""
Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps (parameters, inputs, targets), a row each, to gradients, a row each."""


class Way(Protocol):
    """A way to compute many gradients."""

    name: str

    def __call__(self, parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Maps (parameters, inputs, targets), a row each, to gradients, a row each."""
        ...


class Batched:
    """Computes all gradients at once, for a module and a loss that `vmap` understands.

    The overhead of `vmap` is that of some hundred calls of Python. A number of rows that comes up again and again, as
    under BSP, is therefore traced once into a plain list of tensor operations.
    """

    name = "vmap"

    def __init__(self, workload: Workload, module: nn.Module, layout: Layout) -> None:
        self.layout = layout

        def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return workload.loss(functional_call(module, parameters, (x,)), y)

        self.gradients = vmap(grad(loss), randomness="different")
        self.met: Counter[int] = Counter()
        self.traced: dict[int, Compute] = {}

    def __call__(self, parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
        rows = len(parameters)
        self.met[rows] += 1
        if self.met[rows] == TRACED_AT and len(self.traced) < TRACES:
            # A function of its own: a bound method would be traced with `self` as one more argument.
            self.traced[rows] = make_fx(lambda p, x, y: self.compute(p, x, y))(parameters, x, y)
        return self.traced.get(rows, self.compute)(parameters, x, y)

    def compute(self, parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
        rows, start, named = len(parameters), 0, {}
        for entry in self.layout.entries:
            named[entry.name] = parameters[:, start : start + entry.numel].view(rows, *entry.shape)
            start += entry.numel
        found = self.gradients(named, x, y)
        return torch.cat([found[entry.name].reshape(rows, -1) for entry in self.layout.entries], 1)


class OneByOne:
    """Computes one gradient after the other, as a training script would."""

    name = "one by one"

    def __init__(self, workload: Workload, module: nn.Module, layout: Layout) -> None:
        self.workload = workload
        self.module = module
        self.layout = layout
        named = dict(module.named_parameters())
        self.trained: list[Tensor] = [named[entry.name] for entry in layout.entries]

    def __call__(self, parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
        gradients = torch.zeros_like(parameters)
        for flat, inputs, targets, row in zip(parameters, x, y, gradients, strict=True):
            with torch.no_grad():
                torch._foreach_copy_(self.trained, self.layout.views(flat))
            loss = self.workload.loss(self.module(inputs), targets)
            found = torch.autograd.grad(loss, self.trained, allow_unused=True)
            for view, gradient in zip(self.layout.views(row), found, strict=True):
                if gradient is not None:
                    view.copy_(gradient)
        return gradients


@dataclass
class Pending:
    """A gradient that was ordered: what it is to be computed from, then what came out."""

    parameters: Tensor
    samples: NDArray[np.int64]
    uses: int
    """How many shards have not consumed their slice yet."""
    gradient: Tensor | None = None


def ways_to_compute(workload: Workload, module: nn.Module, layout: Layout) -> list[Way]:
    """Returns the ways to compute many gradients of a module, on the device where it is, the fastest first.

    The order depends on the module alone and not on a measurement: sums come out a little different in each way, and
    equal seeds must give equal runs.
    """
    made: list[type[Batched] | type[OneByOne] | type[Replayed]] = [Batched, OneByOne]
    if next(module.parameters()).device != CPU:
        convolves = any(isinstance(each, _ConvNd) for each in module.modules())
        made.insert(0 if convolves else 1, Replayed)
    return [make(workload, module, layout) for make in made]


class Gradients:
    """Takes orders for gradients and hands them out. `clip` bounds the norm of each whole gradient."""

    def __init__(
        self,
        workload: Workload,
        module: nn.Module,
        layout: Layout,
        shards: list[slice],
        seed: int = 0,
        clip: float | None = None,
    ) -> None:
        self.name = workload.name
        self.shards = shards
        self.seed = seed
        self.clip = clip
        self.calls = 0
        self.device = next(module.parameters()).device
        self.random_devices = [] if self.device == CPU else [self.device.index]
        self.x, self.y = (in_dtype(tensor, layout.torch_dtype) for tensor in workload.train)
        self.pending: dict[Key, Pending] = {}
        self.at_once = AT_ONCE
        self.ways = ways_to_compute(workload, module, layout)
        """The first is in use. One that has failed is dropped; the last says why."""

    def order(self, key: Key, parameters: Tensor, samples: NDArray[np.int64]) -> None:
        self.pending[key] = Pending(parameters, samples, len(self.shards))

    def cancel(self, key: Key) -> None:
        """Forgets a computation that died with its worker, or was given up."""
        self.pending.pop(key, None)

    def take(self, handle: Handle, shard: int) -> Tensor:
        """Takes the slice of a gradient for one shard; the last shard to take it frees it."""
        gradient = self.look(handle, shard)
        self.discard(handle)
        return gradient

    def look(self, handle: Handle, shard: int) -> Tensor:
        """Returns the slice of a gradient for one shard, without taking it."""
        pending = self.pending[handle.source, handle.incarnation, handle.iteration]
        if pending.gradient is None:
            self._compute()
        return cast(Tensor, pending.gradient)[self.shards[shard]]

    def discard(self, handle: Handle) -> None:
        key = (handle.source, handle.incarnation, handle.iteration)
        pending = self.pending[key]
        pending.uses -= 1
        if pending.uses == 0:
            del self.pending[key]

    def _compute(self) -> None:
        """Computes all outstanding gradients, those on batches of one size together."""
        outstanding = [pending for pending in self.pending.values() if pending.gradient is None]
        outstanding.sort(key=lambda pending: len(pending.samples))
        while outstanding:
            size = len(outstanding[0].samples)
            batch = [pending for pending in outstanding[: self.at_once] if len(pending.samples) == size]
            try:
                self._compute_together(batch)
            except torch.OutOfMemoryError as error:
                if len(batch) == 1:
                    raise self._failure(error) from error
                self.at_once = len(batch) // 2
                continue
            outstanding = outstanding[len(batch) :]

    def _compute_together(self, batch: list[Pending]) -> None:
        samples = torch.from_numpy(np.stack([pending.samples for pending in batch])).to(self.device)
        parameters = torch.stack([pending.parameters for pending in batch])
        gradients = self._gradients(parameters, self.x[samples], self.y[samples])
        if self.clip is not None:
            clip_rows(gradients, self.clip)
        for pending, gradient in zip(batch, gradients, strict=True):
            pending.gradient = gradient

    def _gradients(self, parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        with torch.random.fork_rng(devices=self.random_devices):
            seed_generator(self.device, self.seed * 1_000_003 + self.calls)
            while len(self.ways) > 1:
                try:
                    return self.ways[0](parameters, x, y)
                except torch.OutOfMemoryError:
                    raise
                except Exception:
                    # It cannot be done in this way, or it cannot be computed at all: then the last one says why.
                    del self.ways[0]
            try:
                return self.ways[0](parameters, x, y)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise self._failure(error) from error

    def _failure(self, error: Exception) -> PacelineError:
        said = " ".join(str(error).split())
        return PacelineError(f"the module or the loss of {self.name} failed: {type(error).__name__}: {said}")


def seed_generator(device: torch.device, seed: int) -> None:
    """Seeds torch's generator for this device.

    It is not `torch.manual_seed`, which writes down the stack for every device there might be, milliseconds a call.
    """
    generator = torch.default_generator if device == CPU else torch.cuda.default_generators[device.index]
    generator.manual_seed(seed)


def clip_rows(gradients: Tensor, most: float) -> None:
    """Scales each row whose norm is above `most` down to it, as torch.nn.utils.clip_grad_norm_ does."""
    norms = torch.linalg.vector_norm(gradients, dim=1)
    gradients.mul_((most / (norms + 1e-6)).clamp(max=1.0).unsqueeze(1))
