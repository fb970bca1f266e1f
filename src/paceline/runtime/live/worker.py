"""The worker's side of a live run, inside the user's process: its machine, its segment, its links.

`begin` describes the model to the driver and returns when the first parameters are there. `exchange` hands a
gradient in and returns when the parameters of the next iteration are there: one message to each shard, one
answer from each. The links are read only here, in the thread that calls `step`.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import cluster, policies
from paceline.core.actions import Compute, Send, SetTimer
from paceline.core.events import GradientReady, ParametersArrived, TimerFired, ViewChanged
from paceline.core.messages import Node, Parameters, Pull, Push
from paceline.core.policy import Policy
from paceline.core.worker import Worker
from paceline.errors import PacelineError
from paceline.runtime.driver import Seat, WorkerCarrier
from paceline.runtime.live import memory, wire
from paceline.runtime.live.process import Stopped
from paceline.runtime.live.recording import TraceFile
from paceline.runtime.live.sockets import Context, Link, Waiter
from paceline.tensors import state
from paceline.tensors.layout import Layout, flatten
from paceline.tensors.optimizers import THERE, Hyper, OptimizerSpec, State

IDLE_S = 0.2
HEAR_S = 0.05
"""How long a worker may take to hear the driver: asking costs as much as a small exchange's arithmetic."""
AT_ONCE = 1 << 17
"""Elements that are copied and looked at together: half a megabyte in float32."""


@dataclass
class Described:
    """What a worker trains, as the optimizer knows it."""

    layout: Layout
    tensors: list[Tensor]
    """The trained tensors, as they lie in the layout."""
    optimizer: OptimizerSpec
    state: State
    """What the optimizer has learned already, whole."""
    others: dict[str, Tensor]
    """Frozen parameters and buffers, by name."""
    buffers: dict[str, Tensor]
    aliases: dict[str, str]
    """Second names of tied weights."""

    def digest(self, policy: Policy | None) -> str:
        """What must be the same on every worker."""
        return f"{self.layout.digest()}/{self.optimizer.name}/{policy}"


class LiveWorker(WorkerCarrier):
    """Carries out the actions of one worker's machine."""

    def __init__(self, folder: Path, rank: int, incarnation: int) -> None:
        self.folder = folder
        self.rank = rank
        self.incarnation = incarnation
        self.config = msgspec.json.decode((folder / "config").read_bytes(), type=wire.LiveConfig)
        self.context = Context()
        self.name = b"%d:%d" % (rank, incarnation)
        self.driver = Link(self.context, folder / "driver", b"worker:" + self.name)
        self.waiter = Waiter()
        self.waiter.watch(self.driver)
        self.servers: list[Link] = []
        self.outbox: dict[int, list[Push | Pull]] = {}
        self.ordered: Compute | None = None
        self.timer: tuple[float, int] | None = None
        """When the worker is to pull, if it rests before: naive waiting."""
        self.epoch_s = time.monotonic()
        self.stopping = False
        self.heard_s = 0.0
        self.fetched: set[str] = set()
        self.said: dict[int, wire.Exchange] = {}
        """The last message to each shard."""
        self.pushed: Sequence[Tensor | None] = ()
        """The gradient in it."""
        self.sent_hyper: tuple[Hyper, ...] | None = None
        self.faults = [f for f in self.config.faults if f.worker == rank and f.at_iteration is not None]
        if incarnation > 0:
            self.faults.clear()
        self.scenario = cluster.load(self.config.cluster) if self.config.cluster is not None else None
        if self.scenario is not None:
            self.slowdown = self.scenario.slowdowns(rank, self.config.members.workers, self.config.seed)
        self.pid = os.getpid()
        self.layout: Layout
        self.machine: Worker
        self.seat: Seat
        self.trace: TraceFile

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LiveWorker:
        folder = Path(environment["PACELINE_FOLDER"])
        return cls(folder, int(environment["PACELINE_RANK"]), int(environment["PACELINE_INCARNATION"]))

    def now(self) -> float:
        return time.monotonic() - self.epoch_s

    def begin(self, model: Described, policy: Policy | None) -> tuple[Hyper, ...] | None:
        """Describe the model, wait for the servers, and have its tensors hold the first parameters.

        On the CPU the tensors become views of the segment: what the servers write there is in the model, without
        a copy. From its push to the answer the segment holds the gradient, so `step` does not return before.
        Returns the hyper-parameters the run has by now, if this worker joins late.
        """
        if hasattr(self, "model"):
            raise PacelineError("a worker has one paceline.Optimizer: give it all parameters, in groups if need be")
        self.model = model
        self.layout = layout = model.layout
        tensors, optimizer = model.tensors, model.optimizer
        self.tensors = [tensor.detach() for tensor in tensors]
        self.in_place = all(tensor.device.type == "cpu" for tensor in tensors)
        self.segment = memory.create(self.folder / f"worker-{self.rank}.{self.incarnation}", layout)
        self.views = layout.views(self.segment)
        self.slice_bytes = layout.slice_bytes(self.config.members.servers)
        self.starts = list(accumulate((entry.numel for entry in layout.entries), initial=0))
        lead = self.rank == 0 and self.incarnation == 0
        if lead:
            flatten(tensors, layout.views(memory.create(self.folder / "initial", layout)))
            if model.state[THERE].any():
                save_file(model.state, self.folder / "initial-state")
            save_file(contiguous(model.others), self.folder / "others")
        self.sent_hyper = optimizer.groups
        self.driver.send(
            wire.encode(
                wire.Describe(
                    self.rank,
                    self.incarnation,
                    model.digest(policy),
                    layout if lead else None,
                    optimizer if lead else None,
                    str(policy) if policy is not None else None,
                    model.aliases,
                )
            )
        )
        begin = self.await_begin()
        if not lead:
            self.take_others()
        self.epoch_s = begin.epoch_s
        members = self.config.members
        for shard in range(members.servers):
            link = Link(self.context, self.folder / f"server-{shard}", self.name)
            self.servers.append(link)
            self.waiter.watch(link)
        machine = policies.parse(begin.policy).machine("worker", self.rank, members, self.config.seed)
        assert isinstance(machine, Worker)
        self.machine = machine
        node = Node("worker", self.rank)
        self.trace = TraceFile(Path(self.config.output), node, self.incarnation)
        self.seat = Seat(node, self.incarnation, machine, self, self.trace.write)
        self.seat.tell(ViewChanged(self.now(), begin.view))
        self.flush()
        self.await_parameters()
        if self.in_place:
            for tensor, view in zip(tensors, self.views, strict=True):
                tensor.data = view
        self.changes = [tensor._version for tensor in tensors]
        if begin.hyper is not None:
            self.sent_hyper = begin.hyper
        return begin.hyper

    def take_others(self) -> None:
        """What is not trained (frozen parameters, buffers) starts as worker 0 has it."""
        theirs = load_file(self.folder / "others")
        with torch.no_grad():
            for name, tensor in self.model.others.items():
                tensor.copy_(theirs[name])

    def await_begin(self) -> wire.Begin:
        while True:
            self.waiter.wait(IDLE_S)
            while (message := self.driver.receive()) is not None:
                match wire.decode_to_worker(message):
                    case wire.Begin() as begin:
                        return begin
                    case wire.Refuse(reason):
                        raise PacelineError(reason)
                    case wire.Stop():
                        raise Stopped

    def exchange(self, gradients: Sequence[Tensor | None], hyper: tuple[Hyper, ...]) -> None:
        """Push a gradient; return when the model holds the parameters of the next iteration."""
        self.check_whole(gradients)
        self.pushed = gradients
        refusal = "" if write_gradient(gradients, self.views) else "the gradient is not finite"
        if refusal:
            rejected = wire.Rejected(self.rank, self.machine.iteration, refusal)
            self.driver.send(wire.encode(rejected))
        absent = tuple(index for index, gradient in enumerate(gradients) if gradient is None)
        self.push(absent, hyper, refusal)

    def check_whole(self, gradients: Sequence[Tensor | None]) -> None:
        """Refuse what would go wrong in silence: this is not the process or not the model that was described."""
        if os.getpid() != self.pid:
            raise PacelineError(f"worker {self.rank} called step in a child process: only the process itself may")
        for index, (tensor, view) in enumerate(zip(self.model.tensors, self.views, strict=True)):
            gradient = gradients[index]
            if gradient is not None and gradient.layout is not torch.strided:
                raise PacelineError(
                    f"{self.layout.entries[index].name} has a sparse gradient: only dense ones can be sent"
                )
            moved = self.in_place and tensor.data_ptr() != view.data_ptr()
            if moved or tensor._version != self.changes[index]:
                raise PacelineError(
                    f"{self.layout.entries[index].name} was changed by the script: once wrapped, parameters belong to "
                    "the servers; load or change them before paceline.Optimizer is made"
                )

    def skip(self, hyper: tuple[Hyper, ...]) -> None:
        """An iteration without a gradient: it counts as progress, and nobody waits for it."""
        self.push((), hyper, "the worker skipped this step")

    def push(self, absent: tuple[int, ...], hyper: tuple[Hyper, ...], refusal: str) -> None:
        ordered = self.ordered
        assert ordered is not None
        self.ordered = None
        changed = hyper if hyper != self.sent_hyper else None
        self.sent_hyper = hyper
        self.seat.tell(GradientReady(self.now(), ordered.iteration, ordered.attempt, self.slice_bytes))
        self.flush(absent, changed, refusal)
        self.await_parameters()

    def await_parameters(self) -> None:
        """Return when the machine orders the next computation.

        All shards must answer before that, so it does not matter whom we hear first. An answer may lead to another
        pull, of the same shard too.
        """
        while self.ordered is None:
            if self.timer is not None:
                self.rest(*self.timer)
                continue
            message = self.servers[min(self.machine.waiting)].wait_for(IDLE_S)
            if message is not None:
                self.hear_shard(wire.decode_from_shard(message))
                self.flush()
            else:
                self.hear_driver()
                self.trace.flush()
        if not self.in_place:
            flatten(self.views, self.tensors)
            self.changes = [tensor._version for tensor in self.model.tensors]
        if time.monotonic() - self.heard_s > HEAR_S:
            self.hear_driver()
        if self.stopping:
            raise Stopped

    def rest(self, due: float, timer: int) -> None:
        """Naive waiting: pull when the time is over. The driver is heard meanwhile."""
        remaining = due - self.now()
        if remaining > 0:
            time.sleep(min(remaining, IDLE_S))
            if remaining > IDLE_S:
                self.hear_driver()
                if self.stopping:
                    raise Stopped
        else:
            self.timer = None
            self.seat.tell(TimerFired(self.now(), timer))
            self.flush()

    def hear_shard(self, message: wire.Fetched | Parameters) -> None:
        if isinstance(message, wire.Fetched):
            self.fetched.add(message.file)
        else:
            self.seat.tell(ParametersArrived(self.now(), message))

    def fetch_state(self) -> State:
        """The optimizer's whole state, from all servers."""
        parts = []
        for shard, link in enumerate(self.servers):
            file = f"state-{self.rank}.{self.incarnation}-{shard}"
            self.fetched.discard(file)
            link.send(wire.encode(wire.Fetch(file)))
            while file not in self.fetched:
                if (message := link.wait_for(IDLE_S)) is not None:
                    self.hear_shard(wire.decode_from_shard(message))
            parts.append(load_file(self.folder / file))
            (self.folder / file).unlink()
        return state.join(parts, self.layout)

    def hear_driver(self) -> None:
        self.heard_s = time.monotonic()
        while (message := self.driver.receive()) is not None:
            match wire.decode_to_worker(message):
                case wire.Stop():
                    self.stopping = True
                case wire.Reopened(shard):
                    self.say_again(shard)

    def say_again(self, shard: int) -> None:
        """A server came back: if we wait for its answer, it may never have seen our push.

        Its half of the segment may hold anything, so the gradient goes there once more.
        """
        if shard not in self.machine.waiting or shard not in self.said:
            return
        part = self.layout.slices(len(self.servers))[shard]
        for piece in self.layout.pieces(part, self.layout.numel) if self.pushed else ():
            start = part.start + piece.offset
            gradient, first = self.pushed[piece.entry], self.starts[piece.entry]
            target = self.segment[start : start + piece.length]
            if gradient is None:
                target.zero_()
            else:
                target.copy_(gradient.reshape(-1)[start - first : start - first + piece.length])
        self.servers[shard].send(wire.encode(self.said[shard]))

    def flush(self, absent: tuple[int, ...] = (), hyper: tuple[Hyper, ...] | None = None, refusal: str = "") -> None:
        """Send what the machine has ordered: one message to each shard."""
        for shard, messages in self.outbox.items():
            exchange = wire.Exchange(tuple(messages), hyper, absent, refusal)
            self.servers[shard].send(wire.encode(exchange))
            # After a rest the pull comes alone: to a server that was restarted, its push is to be said again too.
            before = self.said.get(shard)
            if before is not None and isinstance(before.messages[-1], Push):
                exchange = msgspec.structs.replace(before, messages=(*before.messages, *messages))
            self.said[shard] = exchange
        self.outbox.clear()

    def slow_down(self, started: float) -> None:
        """Make the iteration that began at `started` as long as the scenario says, and let its faults strike."""
        if self.scenario is not None:
            took = time.monotonic() - started
            undisturbed = took if self.scenario.compute_s is None else self.scenario.compute_s
            remaining = self.slowdown() * undisturbed - took
            if remaining > 0:
                time.sleep(remaining)
        for fault in [f for f in self.faults if self.machine.iteration >= (f.at_iteration or 0)]:
            self.faults.remove(fault)
            if fault.kind == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "leave":
                raise Stopped
            elif fault.kind == "pause":
                time.sleep(fault.for_s)

    def log(self, values: dict[str, float]) -> None:
        started = hasattr(self, "machine")
        iteration, updates = (self.machine.iteration, self.machine.versions[0]) if started else (0, 0)
        self.driver.send(wire.encode(wire.Log(self.rank, self.now(), iteration, updates, values)))

    def leave(self, well: bool) -> None:
        """This worker ends. If all is well it leaves its buffers for the average, and says goodbye."""
        if well and hasattr(self, "model"):
            save_file(contiguous(self.model.buffers), self.folder / f"buffers-{self.rank}.{self.incarnation}")
        if well:
            self.driver.send(wire.encode(wire.Leave(self.rank, self.incarnation)))
        if hasattr(self, "trace"):
            self.trace.close()
        self.context.close()

    def compute(self, action: Compute) -> None:
        self.ordered = action

    def send(self, action: Send) -> None:
        self.outbox.setdefault(action.to.rank, []).append(action.message)

    def set_timer(self, action: SetTimer) -> None:
        self.timer = (self.now() + action.after_s, action.timer)


def write_gradient(gradients: Sequence[Tensor | None], views: Sequence[Tensor]) -> bool:
    """Copy a gradient into the segment; whether it is finite. It looks at each part while it is in the cache."""
    finite = True
    for gradient, view in zip(gradients, views, strict=True):
        if gradient is None:
            view.zero_()
        elif view.numel() <= AT_ONCE:
            view.copy_(gradient)
            finite &= is_finite(view)
        else:
            target = view.view(-1)
            for part, values in zip(target.split(AT_ONCE), gradient.reshape(-1).split(AT_ONCE), strict=True):
                part.copy_(values)
                finite &= is_finite(part)
    return finite


def is_finite(values: Tensor) -> bool:
    """Whether all values are: a sum is one pass, and only a sum that is not finite needs a second look."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors wants them: whole, and no two sharing memory."""
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
