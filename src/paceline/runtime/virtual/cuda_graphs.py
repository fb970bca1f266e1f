"""Gradients of virtual workers on a GPU as CUDA graphs: one computation is recorded and replayed for each worker.

A gradient of a small model is some hundred short kernels. Launched one by one from Python they leave the GPU idle, and
one after the other they leave most of it empty. A graph launches them all at once, and graphs on several streams fill
the GPU. Unlike `torch.func.vmap` this keeps every kernel as it is: convolutions with weights of their own for each
worker would otherwise become grouped ones, which are slow.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from paceline.tensors.layout import Layout
from paceline.workloads.base import Workload

LANES = 8
"""So many graphs are replayed at the same time."""
WARM_UP = 2
"""A computation is done so many times before it is recorded, so that libraries have made what they keep."""


class Lane:
    """A stream with the graph of one gradient. What the graph reads and writes is memory of its own."""

    def __init__(
        self, workload: Workload, module: nn.Module, layout: Layout, parameters: Tensor, x: Tensor, y: Tensor
    ) -> None:
        self.workload = workload
        self.module = module
        self.parameters, self.x, self.y = parameters.clone(), x.clone(), y.clone()
        self.trained = [view.detach().requires_grad_() for view in layout.views(self.parameters)]
        self.named = dict(zip((entry.name for entry in layout.entries), self.trained, strict=True))
        self.stream = torch.cuda.Stream(parameters.device)
        self.stream.wait_stream(torch.cuda.current_stream(parameters.device))
        self.graph = torch.cuda.CUDAGraph()
        self.gradient = self.parameters

    def warm_up(self) -> None:
        """Computes as the graph will. It fails if the CPU has to wait for a value, which cannot be recorded."""
        with waiting_refused(), torch.cuda.stream(self.stream):
            for _ in range(WARM_UP):
                self.compute()
        self.stream.synchronize()

    def record(self) -> None:
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.gradient = self.compute()

    def compute(self) -> Tensor:
        loss = self.workload.loss(functional_call(self.module, self.named, (self.x,)), self.y)
        found = torch.autograd.grad(loss, self.trained, allow_unused=True, materialize_grads=True)
        return torch.cat([gradient.reshape(-1) for gradient in found])

    def replay(self, parameters: Tensor, x: Tensor, y: Tensor, gradient: Tensor) -> None:
        """Computes the gradient for these parameters and this batch, some time."""
        with torch.cuda.stream(self.stream):
            self.parameters.copy_(parameters)
            self.x.copy_(x)
            self.y.copy_(y)
            self.graph.replay()
            gradient.copy_(self.gradient)


class Replayed:
    """Computes gradients by replaying graphs, on several streams at once.

    There are graphs for each size of a batch that is met. A module that draws random numbers or changes its buffers has
    one stream: its computations must follow each other.
    """

    name = "CUDA graphs"

    def __init__(self, workload: Workload, module: nn.Module, layout: Layout) -> None:
        self.workload = workload
        self.module = module
        self.layout = layout
        self.in_turn = False
        """Whether computations must follow each other."""
        self.lanes: dict[torch.Size, list[Lane]] = {}
        """The lanes for each shape of a batch."""

    def __call__(self, parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
        lanes = self.lanes.setdefault(x.shape[1:], [])
        while len(lanes) < (1 if self.in_turn else min(LANES, len(parameters))):
            lanes.append(self.record(parameters[0], x[0], y[0]))
        gradients = torch.empty_like(parameters)
        current = torch.cuda.current_stream(parameters.device)
        for lane in lanes:
            lane.stream.wait_stream(current)
        for row, each in enumerate(zip(parameters, x, y, gradients, strict=True)):
            lanes[row % len(lanes)].replay(*each)
        for lane in lanes:
            current.wait_stream(lane.stream)
        return gradients

    def record(self, parameters: Tensor, x: Tensor, y: Tensor) -> Lane:
        """Returns a lane with its graph. The module's buffers and the random numbers stay as they are."""
        buffers = list(self.module.buffers())
        held = [buffer.clone() for buffer in buffers]
        drawn = torch.cuda.get_rng_state(parameters.device)
        lane = Lane(self.workload, self.module, self.layout, parameters, x, y)
        lane.warm_up()
        changed = any(not torch.equal(now, before) for now, before in zip(buffers, held, strict=True))
        self.in_turn = changed or not torch.equal(torch.cuda.get_rng_state(parameters.device), drawn)
        lane.record()
        for buffer, before in zip(buffers, held, strict=True):
            buffer.copy_(before)
        torch.cuda.set_rng_state(drawn, parameters.device)
        return lane


@contextmanager
def waiting_refused() -> Iterator[None]:
    """Has torch raise an error, meanwhile, where the CPU would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
