"""What a computation changes, written down before it begins, so that it can be done as if for the first time.

    gradients    as they were: those of an earlier backward that is being added to, or none. They are not copied before
                 it is known that somebody adds to them: a hook sees to it just before the first addition. A closure
                 that calls `opt.zero_grad()` before it adds has no use for them, and nothing is kept.
    buffers      of the model (batch norm's running mean, for one), copied
    randomness   torch's generators on the CPU and on the GPUs the model is on, and the global ones of `random` and
                 numpy: some thousand bytes, microseconds. Generators that a script has made itself are its own affair.

Parameters are not here: no computation changes them, and fresh ones are the point. Nor is what a script keeps
elsewhere: a counter in a module's `forward` counts an aborted pass too. A closure that draws its own batch from a
`paceline.Sampler` draws it again, or another one, and none is lost (`trainer/sample_leases.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.tensors.layout import put


class ComputationState:
    """`mark` before a computation, `restore` if it was given up, `forget` if not."""

    def __init__(self, tensors: Sequence[Tensor], module: nn.Module | None) -> None:
        self.tensors = tensors
        self.gradients: dict[int, Tensor | None] | None = None
        """Of each tensor, as it was at the mark; None: they need not be kept."""
        self.copies: dict[int, Tensor] = {}
        """The values of those that are being added to."""
        modules = list(module.modules()) if module is not None else []
        self.places = [(owner, name) for owner in modules for name in owner._buffers]
        self.buffers: list[tuple[Tensor, Tensor] | None] = []
        """The tensor that was in each of these places, and what it held."""
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        self.randomness = Randomness(devices)
        for index, tensor in enumerate(tensors):
            tensor.register_hook(partial(self.before_gradient, index))

    def mark(self) -> None:
        self.gradients = {index: tensor.grad for index, tensor in enumerate(self.tensors)}
        self.copies.clear()
        held = [owner._buffers[name] for owner, name in self.places]
        self.buffers = [(buffer, buffer.detach().clone()) if buffer is not None else None for buffer in held]
        self.randomness.mark()

    def before_gradient(self, index: int, arriving: Tensor) -> None:
        """The hook: this tensor's gradient is about to be added to, or to become its first."""
        if self.gradients is None or index in self.copies:
            return
        gradient = self.tensors[index].grad
        if gradient is not None and gradient is self.gradients[index]:
            self.copies[index] = gradient.detach().clone()

    def before_clearing(self) -> None:
        """The computation clears the gradients. If it has not added to them it has no use for them, now or again."""
        if self.gradients is None:
            return
        if not self.copies:
            self.gradients = None
            return
        # What it has made of them it may have taken already. And clearing may be filling with zeros.
        for index, gradient in self.gradients.items():
            if gradient is not None and index not in self.copies and self.tensors[index].grad is gradient:
                self.copies[index] = gradient.detach().clone()

    def forget(self) -> None:
        self.gradients = None
        self.copies.clear()
        self.buffers.clear()

    @torch.no_grad()
    def restore(self) -> None:
        for index, tensor in enumerate(self.tensors):
            gradient = self.gradients[index] if self.gradients is not None else None
            if gradient is not None and index in self.copies:
                gradient.copy_(self.copies[index])
            tensor.grad = gradient
        for (owner, name), kept in zip(self.places, self.buffers, strict=True):
            if kept is None:
                owner._buffers[name] = None
            else:
                buffer, values = kept
                if not torch.equal(buffer, values):  # those that are constant may lie where nobody can write
                    put(buffer, values)
                owner._buffers[name] = buffer
        self.randomness.restore()
        self.forget()


class Randomness:
    """The states of the generators that a training script uses without naming them."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = list(devices)
        self.states: tuple[Any, ...] = ()

    def mark(self) -> None:
        gpus = [torch.cuda.get_rng_state(device) for device in self.devices]
        self.states = (torch.get_rng_state(), gpus, random.getstate(), np.random.get_state())

    def restore(self) -> None:
        cpu, gpus, plain, numpy = self.states
        torch.set_rng_state(cpu)
        for device, state in zip(self.devices, gpus, strict=True):
            torch.cuda.set_rng_state(state, device)
        random.setstate(plain)
        np.random.set_state(numpy)
