"""The worker's side of a live run, inside the user's process: its machine, its segment, its links.

`begin` (`joining.py`) describes the model to the driver and returns when the first parameters are there.
`exchange` hands a gradient in and returns when the parameters of the next iteration are there: one message to
each shard, one answer from each. The links are read only here, in the thread that calls `step`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from paceline.core.actions import AbortCompute, Compute, Send, SetTimer
from paceline.core.events import (
    ComputeAborted,
    GradientReady,
    ReleaseArrived,
    ResyncArrived,
    TimerFired,
)
from paceline.core.messages import Notify, Pull, Push, Resync
from paceline.core.policy import Policy
from paceline.core.scheduler import SCHEDULER
from paceline.core.worker import Worker
from paceline.errors import PacelineError
from paceline.runtime.driver import NoSuchAction, Seat, WorkerCarrier
from paceline.runtime.live import wire
from paceline.runtime.live.configuration import LiveConfig
from paceline.runtime.live.process import Stopped
from paceline.runtime.live.recording import TraceFile
from paceline.runtime.live.sockets import Link, Waiter
from paceline.runtime.live.worker import joining
from paceline.runtime.live.worker.aborting import Aborting
from paceline.runtime.live.worker.description import Described, leave_buffers
from paceline.runtime.live.worker.hands import Hands
from paceline.runtime.live.worker.hindering import Hindrance
from paceline.runtime.live.worker.overlap import Overlap
from paceline.runtime.live.worker.segments import Segments
from paceline.runtime.live.worker.staging import Transfer
from paceline.runtime.live.worker.talking import Talk
from paceline.tensors.layout import Layout
from paceline.tensors.passes import is_finite
from paceline.tensors.steppers import Hyper, State

IDLE_S = 0.2
PATIENCE_S = 5.0
"""How long a worker that was told to stop waits for the answer to its last push."""
HEAR_S = 0.05
"""How long a worker may take to hear the driver: asking costs as much as a small exchange's arithmetic."""


class LiveWorker(WorkerCarrier):
    """Carries out the actions of one worker's machine."""

    has_servers: Literal[True] = True

    def __init__(self, folder: Path, rank: int, incarnation: int) -> None:
        self.folder = folder
        self.rank = rank
        self.incarnation = incarnation
        self.config = msgspec.json.decode((folder / "config").read_bytes(), type=LiveConfig)
        self.name = b"%d:%d" % (rank, incarnation)
        self.driver = Link(folder / "driver", b"worker:" + self.name)
        self.waiter = Waiter()
        self.waiter.watch(self.driver)
        self.talk = Talk(self)
        self.to_scheduler: list[Pull | Notify] = []
        self.ordered: Compute | None = None
        self.timer: tuple[float, int] | None = None
        """When the worker is to pull, if it rests before: naive waiting."""
        self.epoch_s = time.monotonic()
        self.stopping = False
        self.told_to_stop_s = 0.0
        self.refused = False
        """The last push came without a gradient that could be used."""
        self.heard_s = 0.0
        self.hands = Hands(self)
        self.pushed: Sequence[Tensor | None] = ()
        """The gradient in the last push."""
        self.hold_at: int | None = None
        """The first iteration that must not be pushed, if the driver has said so, servers being about to change."""
        self.change = 0
        self.said_held = False
        """Whether the driver knows that this worker stands still, and since when it does."""
        self.held_since = 0.0
        self.hindrance = Hindrance(self.config, rank, incarnation)
        self.pid = os.getpid()
        self.overlap: Overlap | None = None
        self.aborting: Aborting | None = None
        """Under a policy that gives computations up."""
        self.stretched: Compute | None = None
        """The computation that was last made as long as the scenario says."""
        # What `begin` adds.
        self.model: Described
        self.layout: Layout
        self.segments: Segments
        self.transfer: Transfer
        self.changes: list[int]
        """How often each tensor had been written to when its parameters came."""
        self.machine: Worker
        self.seat: Seat
        self.trace: TraceFile

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LiveWorker:
        folder = Path(environment["PACELINE_FOLDER"])
        return cls(folder, int(environment["PACELINE_RANK"]), int(environment["PACELINE_INCARNATION"]))

    def now(self) -> float:
        return time.monotonic() - self.epoch_s

    @property
    def iteration(self) -> int:
        return self.machine.iteration

    @property
    def dropped(self) -> Sequence[bool]:
        """Of each shard: whether the last gradient did not count there."""
        return self.machine.dropped

    def begin(self, model: Described, policy: Policy | None, overlap: bool = False) -> tuple[Hyper, ...] | None:
        """Describe the model, wait for the servers, and have its tensors hold the first parameters.

        From its push to the answer the segment may hold the gradient, so `step` does not return before.
        Returns the hyper-parameters the run has by now, if this worker joins late.
        """
        if hasattr(self, "model"):
            raise PacelineError("a worker has one paceline.Optimizer: give it all parameters, in groups if need be")
        return joining.join(self, model, policy, overlap)

    def exchange(self, gradients: Sequence[Tensor | None], hyper: tuple[Hyper, ...]) -> None:
        """Push a gradient; return when the model holds the parameters of the next iteration."""
        self.check_whole(gradients)
        self.pushed = gradients
        if self.overlap is not None:
            finite = self.overlap.commit(gradients)
        elif self.talk.cargo is not None and self.talk.loosen(self.talk.cargo, gradients):
            finite = all(is_finite(gradient) for gradient in gradients if gradient is not None)
        else:
            finite = self.transfer.write(gradients)
        refusal = "" if finite else "the gradient is not finite"
        if refusal:
            rejected = wire.Rejected(self.rank, self.machine.iteration, refusal)
            self.driver.send(wire.encode(rejected))
        absent = tuple([index for index, gradient in enumerate(gradients) if gradient is None])
        self.push(absent, hyper, refusal)

    def check_whole(self, gradients: Sequence[Tensor | None]) -> None:
        """Refuse what would go wrong in silence: this is not the process or not the model that was described."""
        if os.getpid() != self.pid:
            raise PacelineError(f"worker {self.rank} called step in a child process: only the process itself may")
        for index, tensor in enumerate(self.model.tensors):
            gradient = gradients[index]
            if gradient is not None and gradient.layout is not torch.strided:
                raise PacelineError(
                    f"{self.layout.entries[index].name} has a sparse gradient: only dense ones can be sent"
                )
            if self.segments.moved(index) or tensor._version != self.changes[index]:
                raise PacelineError(
                    f"{self.layout.entries[index].name} was changed by the script: once wrapped, parameters belong to "
                    "the servers; load or change them before paceline.Optimizer is made"
                )

    def find_parameters(self) -> None:
        """Have them where the servers say they are: in a segment for all, or in this worker's own."""
        if all(door.common for door in self.talk.doors):
            self.segments.share()
        else:
            self.segments.unshare(bool(self.pushed))

    def skip(self, hyper: tuple[Hyper, ...]) -> None:
        """An iteration without a gradient: it counts as progress, and nobody waits for it."""
        self.forget_staged()
        self.push((), hyper, "the worker skipped this step")

    def forget_staged(self) -> None:
        """What backward has staged so far will not be pushed."""
        if self.overlap is not None:
            self.overlap.forget()

    def push(self, absent: tuple[int, ...], hyper: tuple[Hyper, ...], refusal: str) -> None:
        self.stand_still()
        if self.talk.cargo is not None and self.talk.fasten(self.talk.cargo):
            self.transfer.write(self.pushed)
        ordered = self.ordered
        assert ordered is not None
        self.ordered = None
        said = self.talk.sent_hyper
        changed = None if hyper is said or hyper == said else hyper
        self.talk.sent_hyper = hyper
        self.refused = bool(refusal)
        self.transfer.settle()
        self.seat.tell(GradientReady(self.now(), ordered.iteration, ordered.attempt, self.talk.slice_bytes))
        self.flush(absent, changed, refusal)
        self.await_parameters()

    def begin_again(self) -> None:
        """The computation that was ordered is given up: return when fresh parameters for it are there."""
        ordered = self.ordered
        assert ordered is not None
        self.transfer.settle()
        self.seat.tell(ResyncArrived(self.now(), Resync(self.rank, self.incarnation, ordered.iteration)))
        self.ordered = None
        self.seat.tell(ComputeAborted(self.now(), ordered.iteration, ordered.attempt))
        self.flush()
        self.await_order()

    def stand_still(self) -> None:
        """If the driver wants nothing to be under way, the servers being about to change, wait here until they have.

        Everything pushed so far is answered, and the gradient in the segment is nobody's yet.
        """
        if time.monotonic() - self.heard_s > HEAR_S:
            self.hear_driver()
        while self.hold_at is not None and self.machine.iteration >= self.hold_at:
            if not self.said_held:
                self.said_held = True
                self.held_since = self.now()
                held = wire.Held(self.change, self.rank, self.incarnation, self.machine.iteration)
                self.driver.send(wire.encode(held))
            self.await_driver()
            self.trace.flush()
            if self.stopping:
                raise Stopped

    def reslice(self, order: wire.Resliced) -> None:
        """There are other servers, or these have other parts of the parameters: go on with them."""
        self.talk.meet(order.assignment, order.doors)
        self.hold_at = None
        self.talk.sent_hyper = None
        self.talk.said.clear()
        self.seat.tell(msgspec.structs.replace(order.event, at=self.now(), since=self.held_since))

    def await_parameters(self) -> None:
        """Return when the machine has ordered the next iteration's computation, and settle the last one's samples."""
        self.await_order()
        self.pushed = ()
        if time.monotonic() - self.heard_s > HEAR_S:
            self.hear_driver()
        # A gradient that is not finite, or none at all, will not be better next time: its samples are done with.
        self.hands.settle(counted=self.refused or not all(self.machine.dropped))
        if self.talk.cargo is not None:
            self.talk.cargo.loose = ()  # every server has it
        if self.stopping:
            raise Stopped

    def await_order(self) -> None:
        """Return when the machine orders a computation, and the model holds the parameters for it.

        All shards must answer before that, so it does not matter whom we hear first. An answer may lead to another
        pull, of the same shard too.
        """
        while self.ordered is None:
            if self.timer is not None:
                self.rest(*self.timer)
                continue
            if self.machine.pausing:  # the scheduler decides
                self.await_driver()
                self.flush()
                self.give_up_waiting()
                continue
            if self.talk.hear_any(self.machine.waiting, IDLE_S):
                if self.talk.outbox or self.to_scheduler:
                    self.flush()
            else:
                gone = [shard for shard in self.machine.waiting if self.talk.links[shard].gone]
                if len(gone) == len(self.machine.waiting):
                    self.waiter.wait(IDLE_S)  # the driver says when they are back
                for shard in gone:
                    self.talk.mend(shard)
                self.hear_driver()
                self.trace.flush()
                self.give_up_waiting()
        if self.segments.window is not None:
            self.segments.window.look_again()  # the server has stepped what is seen through it
        elif not self.segments.in_place:
            self.transfer.load()
            self.changes = [tensor._version for tensor in self.model.tensors]

    def give_up_waiting(self) -> None:
        """A run that is to end does not wait long for an answer."""
        if self.stopping and time.monotonic() - self.told_to_stop_s > PATIENCE_S:
            raise Stopped

    def rest(self, due: float, timer: int) -> None:
        """Naive waiting: pull when the time is over. The driver is heard meanwhile."""
        remaining = due - self.now()
        if remaining > 0:
            self.waiter.wait(min(remaining, IDLE_S))
            self.hear_driver()
            if self.stopping:
                raise Stopped
        else:
            self.timer = None
            self.seat.tell(TimerFired(self.now(), timer))
            self.flush()

    def fetch_state(self) -> State:
        """The optimizer's whole state, from all servers."""
        return self.talk.fetch_state()

    def hear_driver(self) -> None:
        self.heard_s = time.monotonic()
        while (message := self.driver.receive()) is not None:
            self.obey(wire.decode_to_worker(message))

    def await_driver(self) -> None:
        """Hear what the driver says next, if it says something soon."""
        if not self.driver.heard_some:
            self.waiter.wait(IDLE_S)
        if (message := self.driver.receive()) is not None:
            self.obey(wire.decode_to_worker(message))

    def obey(self, message: wire.ToWorker) -> None:
        match message:
            case wire.Stop():
                self.stopping = True
                self.told_to_stop_s = time.monotonic()
            case wire.Reopened(shard, door):
                self.talk.reopened(shard, door)
            case wire.Hold(change, at):
                self.change, self.hold_at = change, at
                self.said_held = False
            case wire.Resliced():
                self.reslice(message)
            case wire.Told(release):
                self.seat.tell(ReleaseArrived(self.now(), release))
            case wire.Dealt():
                self.hands.take(message)
            case wire.Refuse(reason):
                raise PacelineError(reason)

    def flush(self, absent: tuple[int, ...] = (), hyper: tuple[Hyper, ...] | None = None, refusal: str = "") -> None:
        """Send what the machine has ordered."""
        self.talk.flush(absent, hyper, refusal)
        for said in self.to_scheduler:
            self.driver.send(wire.encode(wire.Ask(said)))
        self.to_scheduler.clear()

    def slow_down(self, started: float) -> None:
        """Make the iteration that began at `started` as long as the scenario says, and let its faults strike."""
        if self.hindrance.scenario is None:
            return
        self.stretch(started)
        self.hindrance.strike(self.machine.iteration)
        for want in self.hindrance.wanted_servers(self.machine.iteration):
            self.driver.send(wire.encode(want))
        self.pass_slow_link()

    def stretch(self, started: float, look: Callable[[], None] | None = None) -> None:
        """Make the computation that is ordered as long as the scenario says, once; `look` now and then meanwhile."""
        if self.stretched is not self.ordered:
            self.stretched = self.ordered
            self.hindrance.slow_down(started, look)

    def pass_slow_link(self) -> None:
        """A scenario's slow connection takes its time."""
        if self.hindrance.link is not None:
            self.hindrance.pass_link(sum(self.talk.slice_bytes))

    def log(self, values: dict[str, float]) -> None:
        started = hasattr(self, "machine")
        iteration, updates = (self.machine.iteration, self.machine.versions[0]) if started else (0, 0)
        self.driver.send(wire.encode(wire.Log(self.rank, self.now(), iteration, updates, values)))

    def leave(self, well: bool) -> None:
        """This worker ends. If all is well it leaves its buffers for the average, and says goodbye."""
        if well and hasattr(self, "model"):
            leave_buffers(self.model.buffers, self.folder, self.rank, self.incarnation)
        self.hands.report()
        if well:
            self.driver.send(wire.encode(wire.Leave(self.rank, self.incarnation)))
        if hasattr(self, "trace"):
            self.trace.close()
        if self.aborting is not None:
            self.aborting.close()
        if hasattr(self, "segments"):
            self.segments.close()
        self.talk.close()
        self.driver.close()
        self.waiter.close()

    def compute(self, action: Compute) -> None:
        self.ordered = action

    def abort_compute(self, action: AbortCompute) -> None:
        """Done already: the machine hears of a re-sync only after `Aborting` has given the computation up."""

    def send(self, action: Send) -> None:
        message = action.message
        if action.to == SCHEDULER and isinstance(message, Pull | Notify):
            self.to_scheduler.append(message)
        elif isinstance(message, Push | Pull):
            self.talk.say(action.to.rank, message)
        else:
            raise NoSuchAction(f"a worker cannot {action}")

    def set_timer(self, action: SetTimer) -> None:
        self.timer = (self.now() + action.after_s, action.timer)
