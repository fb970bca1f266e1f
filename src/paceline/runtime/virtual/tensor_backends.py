"""The backends with tensors: a model on servers or on peers, real gradients, and what the model is worth as it goes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.core.actions import Apply, Reduce
from paceline.core.messages import Handle
from paceline.core.push_weights import shares_of
from paceline.run import ON_SERVERS, Point, Target
from paceline.runtime.clipping import check_clip_mean
from paceline.runtime.virtual.backend import Backend, Process
from paceline.runtime.virtual.engine import Engine
from paceline.runtime.virtual.gradients import Gradients
from paceline.runtime.virtual.outer_gradients import OuterGradients
from paceline.runtime.virtual.world import SimulationPlan
from paceline.sample_order import SHUFFLED, Batch, BatchSizes, sample_order_of
from paceline.tensors.device_optimizer import DeviceOptimizer, SliceOptimizer
from paceline.tensors.devices import CPU
from paceline.tensors.layout import EPS, Part, flatten, layout_of
from paceline.tensors.optimizers import OptimizerSpec
from paceline.tensors.outer_optimizers import borders_of, inner_and_outer
from paceline.tensors.shard_optimizer import ShardOptimizer
from paceline.tensors.significance import significance
from paceline.workloads.base import Workload

WHOLE = 0
"""A peer's gradient is one slice."""

Watcher = Callable[[Point], None]


@dataclass(frozen=True)
class Training:
    """What is trained, and how. A `target` that is reached ends the run."""

    workload: Workload
    optimizer: OptimizerSpec
    target: Target | None = None
    batch: Batch | None = None
    dtype: torch.dtype = torch.float32
    slicing: str = EPS
    """How the parameters are cut over the servers."""
    shards: str = SHUFFLED
    """How samples are dealt: shuffled, or sorted by label, each worker its own for good."""
    device: torch.device = CPU
    """Where gradients are computed, and where data, parameters and the optimizer's state are."""


class TensorBackend(Backend):
    """What servers and peers have in common: the model, its gradients and its evaluation."""

    name = "virtual"
    has_tensors = True
    evaluated: ClassVar[str]
    """In words, which model is evaluated."""

    def __init__(self, plan: SimulationPlan, training: Training, engine: Engine, watch: Watcher | None = None) -> None:
        workload, optimizer, self.workers = training.workload, training.optimizer, plan.members.workers
        self.training = training
        self.engine = engine
        self.watch = watch
        self.device = training.device
        self.workload = workload.on(self.device)
        self.module = workload.module(plan.seed, training.dtype).to(self.device)
        named = [(name, p, 0) for name, p in self.module.named_parameters() if p.requires_grad]
        self.inner, self.outer = optimizer, optimizer
        """What is stepped with by a worker with local steps, and by servers (or by peers)."""
        if plan.local is not None:
            self.inner, self.outer = inner_and_outer(optimizer, plan.local)
        borders = "layers" if plan.by_layer else borders_of(self.inner, self.outer)
        self.layout = layout_of(named, borders, training.slicing)
        self.inner.check(self.layout)
        self.outer.check(self.layout)
        check_clip_mean(plan.policy, self.outer.extras)
        parts = max(1, plan.members.servers)
        super().__init__(self.layout.slice_bytes(parts))
        self.clips_mean = self.outer.extras.clip_mean is not None
        self.names = {name for name, _, _ in named}
        self.trained: list[Tensor] = [parameter for _, parameter, _ in named]
        self.flat = self.layout.empty(self.device)
        """The parameters that are evaluated."""
        flatten(self.trained, self.layout.views(self.flat))
        self.shards = self.layout.slices(parts)
        work = (self.workload, self.module, self.layout, self.shards, plan.seed, self.inner.extras.clip)
        self.rounds = OuterGradients(*work, inner=self.inner_optimizer) if plan.local is not None else None
        self.gradients = self.rounds or Gradients(*work)
        batch = training.batch or workload.batch
        self.sample_order = sample_order_of(training.shards, workload.train, self.workers, batch, plan.seed)
        self.balanced = isinstance(plan.batch, BatchSizes)
        self.history: list[Point] = []
        self.evaluated_at = 0
        """How many gradients had been consumed at the last evaluation."""
        self.consensus: list[tuple[float, float]] = []
        """Without servers: when, and how far from their average the peers were."""
        self.reached_s: float | None = None

    def optimizer(self, part: Part, values: Tensor) -> SliceOptimizer:
        """Makes what steps a part of the parameters, where they are."""
        make = ShardOptimizer if self.device == CPU else DeviceOptimizer
        return make(self.layout, part, values, self.outer)

    def inner_optimizer(self, values: Tensor) -> SliceOptimizer:
        """Makes what steps a worker's own parameters."""
        make = ShardOptimizer if self.device == CPU else DeviceOptimizer
        return make(self.layout, self.layout.slices(1)[0], values, self.inner)

    def local_step(self, process: Process, iteration: int, step: int, samples: int) -> None:
        assert self.rounds is not None
        self.rounds.step((*process, iteration), self.sample_order.of_worker(process[0], step))

    def order(self, process: Process, iteration: int, parameters: Tensor, samples: int) -> None:
        """Have a gradient computed on these parameters some time, and on the samples that are the worker's turn.

        Where batches are balanced those are the next of all, so that together they are one pass over the data.
        """
        order = self.sample_order
        turn = order.next(samples) if self.balanced else order.of_worker(process[0], iteration)
        self.gradients.order((*process, iteration), parameters, turn)

    def abort(self, process: Process, iteration: int) -> None:
        self.gradients.cancel((*process, iteration))

    def consumed(self) -> int:
        """How many gradients have been taken in everywhere."""
        raise NotImplementedError

    def steps(self) -> int:
        """How many steps the model that is evaluated has made."""
        raise NotImplementedError

    def averages(self) -> list[Tensor]:
        """The moving averages of the parameters, if any are kept."""
        raise NotImplementedError

    def consider_evaluation(self) -> None:
        """Evaluate when as many gradients again have been consumed as there are workers."""
        if self.consumed() >= self.evaluated_at + self.workers and not self.engine.stopped:
            self.evaluate()

    def evaluate(self) -> None:
        """Note what the model is worth now. The run ends if it has reached its target, or diverged."""
        self.evaluated_at = self.consumed()
        with torch.no_grad():
            torch._foreach_copy_(self.trained, self.layout.views(self.flat))
        measured = self.workload.evaluate(self.module)
        point = Point(self.engine.now, self.steps(), measured)
        self.history.append(point)
        if self.watch is not None:
            self.watch(point)
        target = self.training.target
        if target is not None and target.reached(point):
            self.reached_s = self.engine.now
        if self.reached_s is not None or point.loss is None or not math.isfinite(point.loss):
            self.engine.stop()

    def others(self) -> dict[str, Tensor]:
        """What the model holds besides what is trained: frozen parameters and buffers."""
        held = self.module.state_dict()
        return {name: value.cpu().clone() for name, value in held.items() if name not in self.names}


class ServerTensors(TensorBackend):
    """One copy of the parameters, in slices, each stepped by its shard's optimizer."""

    evaluated = ON_SERVERS

    def __init__(self, plan: SimulationPlan, training: Training, engine: Engine, watch: Watcher | None = None) -> None:
        super().__init__(plan, training, engine, watch)
        self.optimizers = [self.optimizer(part, self.flat[part]) for part in self.shards]
        self.consumed_by = [0] * len(self.shards)
        """How many gradients each shard has applied, and in how many steps."""
        self.steps_of = [0] * len(self.shards)
        self.pulled: dict[Process, Tensor] = {}
        """What each worker has pulled for its next iteration. Not written any more once that has begun."""

    def leave(self, process: Process) -> None:
        self.pulled.pop(process, None)
        if self.rounds is not None:
            self.rounds.forget(process)

    def begin_round(self, process: Process, iteration: int) -> None:
        assert self.rounds is not None
        self.rounds.begin((*process, iteration), self.pulled.pop(process))

    def read(self, process: Process, shard: int) -> None:
        if process not in self.pulled:
            self.pulled[process] = torch.empty_like(self.flat)
        self.pulled[process][self.shards[shard]] = self.optimizers[shard].values

    def compute(self, process: Process, iteration: int, samples: int) -> None:
        self.order(process, iteration, self.pulled.pop(process), samples)

    def apply(self, rank: int, action: Apply) -> None:
        optimizer = self.optimizers[rank]
        gradients = [optimizer.cut(self.gradients.take(handle, rank)) for handle in action.handles]
        optimizer.apply(gradients, action.weight, norm=action.norm, shares=shares_of(action.handles))
        self.consumed_by[rank] += len(gradients)
        self.steps_of[rank] += 1
        self.consider_evaluation()

    def drop(self, rank: int, handle: Handle) -> None:
        self.gradients.discard(handle)

    def significance(self, shard: int, handle: Handle) -> float:
        return significance([self.gradients.look(handle, shard)], self.optimizers[shard].values)

    def squared_norm(self, shard: int, handles: tuple[Handle, ...]) -> float:
        optimizer = self.optimizers[shard]
        gradients = [optimizer.cut(self.gradients.look(handle, shard)) for handle in handles]
        return optimizer.measure(gradients, shares_of(handles))

    def consumed(self) -> int:
        return min(self.consumed_by)

    def steps(self) -> int:
        return self.steps_of[0]

    def averages(self) -> list[Tensor]:
        parts = [optimizer.average for optimizer in self.optimizers if optimizer.average is not None]
        return [torch.cat(parts)] if parts else []


class PeerTensors(TensorBackend):
    """Parameters and an optimizer for each peer, and what has come from others and is not averaged yet.

    What is evaluated, and what a run leaves, is the average of the live peers' parameters.
    """

    evaluated = "the average of the peers"

    def __init__(self, plan: SimulationPlan, training: Training, engine: Engine, watch: Watcher | None = None) -> None:
        super().__init__(plan, training, engine, watch)
        self.initial = self.flat.clone()
        self.peers: dict[int, SliceOptimizer] = {}
        self.begun: set[int] = set()
        """Those that have parameters to compute with: one that joins has none until neighbours have sent it some."""
        self.received: dict[int, dict[Handle, Tensor]] = {}
        self.sent: dict[int, tuple[Handle, Tensor]] = {}
        """What each has sent last: neighbours that are sent the same share one copy."""

    def join(self, process: Process) -> None:
        rank = process[0]
        self.peers[rank] = self.optimizer(self.shards[WHOLE], self.initial.clone())
        self.received[rank] = {}

    def leave(self, process: Process) -> None:
        rank = process[0]
        del self.peers[rank], self.received[rank]
        self.sent.pop(rank, None)
        self.begun.discard(rank)
        if self.rounds is not None:
            self.rounds.forget(process)

    def begin_round(self, process: Process, iteration: int) -> None:
        assert self.rounds is not None
        self.begun.add(process[0])
        self.rounds.begin((*process, iteration), self.peers[process[0]].values.clone())

    def compute(self, process: Process, iteration: int, samples: int) -> None:
        self.begun.add(process[0])
        self.order(process, iteration, self.peers[process[0]].values.clone(), samples)

    def apply(self, rank: int, action: Apply) -> None:
        optimizer = self.peers[rank]
        gradients = [optimizer.cut(self.gradients.take(handle, WHOLE)) for handle in action.handles]
        optimizer.apply(gradients, action.weight)
        self.updates += 1
        self.consider_evaluation()

    def drop(self, rank: int, handle: Handle) -> None:
        if handle.source == rank:
            self.gradients.discard(handle)
        else:
            del self.received[rank][handle]

    def snapshot(self, rank: int, handle: Handle) -> Tensor:
        if rank not in self.sent or self.sent[rank][0] != handle:
            self.sent[rank] = (handle, self.peers[rank].values.clone())
        return self.sent[rank][1]

    def keep(self, rank: int, handle: Handle, values: Tensor) -> None:
        self.received[rank][handle] = values

    def reduce(self, rank: int, action: Reduce) -> None:
        values, received = self.peers[rank].values, self.received[rank]
        values.mul_(action.own)
        for handle, weight in zip(action.handles, action.weights, strict=True):
            values.add_(received.pop(handle), alpha=weight)

    def holders(self) -> list[SliceOptimizer]:
        """Whose parameters count: of those who are there, the ones that have begun; at the start all are alike."""
        return [self.peers[rank] for rank in self.peers if rank in self.begun] or list(self.peers.values())

    def consumed(self) -> int:
        return self.updates

    def steps(self) -> int:
        return self.updates // self.workers

    def evaluate(self) -> None:
        if self.peers:
            stacked = torch.stack([peer.values for peer in self.holders()])
            torch.mean(stacked, 0, out=self.flat)
            apart = torch.linalg.vector_norm(stacked - self.flat, dim=1).mean()
            self.consensus.append((self.engine.now, float(apart)))
        super().evaluate()

    def averages(self) -> list[Tensor]:
        return [peer.average for peer in self.holders() if peer.average is not None]
