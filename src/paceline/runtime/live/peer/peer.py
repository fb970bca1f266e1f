"""A peer of a live run, inside the user's process: its machine, its parameters, its neighbours.

There are no servers: the user's own optimizer steps here. `exchange` hands a gradient in and returns when the machine
orders the next computation; what the machine orders in between (average, step, send) is done here, in the thread that
calls `step`. While the script computes nobody is heard, and nobody needs to be: what neighbours send waits in their
slots (`slots.py`) and in the socket. Only who joins, and AD-PSGD's partner, waits for this peer's next step.

A view is told to the machine after everything that neighbours have said before it. A peer whose script has ended stays,
and hears its neighbours, until a view does not name it any more (`peers.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline import policies
from paceline.core.actions import Apply, Compute, Drop, Reduce, Send, Wait
from paceline.core.events import Event, GradientReady, GradientRejected, ViewChanged
from paceline.core.gossip import NOBODY, Gossip
from paceline.core.messages import Ack, Hello, Node, Offer, Reply, Token, Update, View
from paceline.core.peer import Peer
from paceline.core.policy import PeerPolicy, Policy
from paceline.errors import ConfigError, PacelineError
from paceline.runtime.driver import NoSuchAction, Seat, event_of
from paceline.runtime.live import memory, wire
from paceline.runtime.live.configuration import Door, LiveConfig
from paceline.runtime.live.driver.peers import final_path, leave_final
from paceline.runtime.live.peer.neighbours import Neighbours
from paceline.runtime.live.peer.slots import Process, Values
from paceline.runtime.live.process import Stopped
from paceline.runtime.live.recording import TraceFile
from paceline.runtime.live.worker import joining
from paceline.runtime.live.worker.aborting import Aborting
from paceline.runtime.live.worker.description import Described, leave_buffers
from paceline.runtime.live.worker.hands import Hands
from paceline.runtime.live.worker.worker import IDLE_S, PATIENCE_S, LiveWorker
from paceline.tensors import state
from paceline.tensors.layout import Layout
from paceline.tensors.passes import is_finite
from paceline.tensors.steppers import Hyper

STATUS_S = 0.5


def is_for_peers(config: LiveConfig, policy: Policy | None) -> bool:
    """Whether the policy in force, the run's or else the script's, has no servers."""
    return isinstance(policies.parse(config.policy) if config.policy is not None else policy, PeerPolicy)


class LivePeer:
    """Carries out the actions of one peer's machine."""

    has_servers: Literal[False] = False

    def __init__(self, worker: LiveWorker, inner: torch.optim.Optimizer, step: Callable[[], None]) -> None:
        """A process of the run that turns out to be a peer. `step` steps `inner`, on the gradients that are there."""
        self.folder = worker.folder
        self.rank = worker.rank
        self.incarnation = worker.incarnation
        self.config = worker.config
        self.driver = worker.driver
        self.waiter = worker.waiter
        self.hindrance = worker.hindrance
        self.pid = worker.pid
        self.epoch_s = worker.epoch_s
        self.inner = inner
        self.step = step
        self.hands = Hands(self)
        self.view = View(0, ())
        self.ordered: Compute | None = None
        self.holds_parameters = False
        self.changed = False
        """The parameters are not those that it left last."""
        self.dropped = [False]
        """Whether the last gradient was not used, as a worker with one shard has it."""
        self.aborting: Aborting | None = None
        """No policy of peers gives computations up."""
        self.done: set[Process] = set()
        """Members that have sent all they will ever send."""
        self.passed_over: set[Process] = set()
        """Those of them that this peer would not wait for."""
        self.staying = False
        """The script has ended; the neighbours may not be done."""
        self.stopping = False
        self.told_to_stop_s = 0.0
        self.waits = ""
        self.staleness = 0
        self.hyper: tuple[Hyper, ...] = ()
        self.told_status_s = 0.0
        self.before = 0
        """Iterations of the run that this one goes on from."""
        # What `begin` adds.
        self.model: Described
        self.layout: Layout
        self.nbytes: int
        """Of all its parameters."""
        self.values: Values
        self.changes: list[int]
        """How often each tensor had been written to when the last step was done."""
        self.neighbours: Neighbours
        self.machine: Peer | Gossip
        self.seat: Seat
        self.trace: TraceFile

    def now(self) -> float:
        return time.monotonic() - self.epoch_s

    @property
    def iteration(self) -> int:
        return self.before + self.machine.iteration

    # Coming and going.

    def begin(self, model: Described, policy: Policy | None, overlap: bool) -> tuple[Hyper, ...] | None:
        """Describe the model, wait for the others, and have it hold the first parameters.

        Returns the hyper-parameters the run has by now, if this peer joins late.
        """
        refuse(model, overlap)
        self.model = model
        self.layout = model.layout
        self.nbytes = model.layout.numel * model.layout.itemsize
        me = (self.rank, self.incarnation)
        self.neighbours = Neighbours(self.folder, me, model.layout, self.config, self.waiter)
        self.values = Values(model.tensors, self.neighbours.shelf)
        begin = joining.introduce(self, model, policy, self.neighbours.door)
        self.epoch_s, self.before = begin.epoch_s, begin.iteration
        if begin.view.number == 1:
            self._take_first_parameters()
        self.values.load()
        chosen = policies.parse(begin.policy)
        assert isinstance(chosen, PeerPolicy)
        assert begin.graph is not None
        machine = chosen.peer(self.rank, begin.graph, self.config.seed)
        assert isinstance(machine, Peer | Gossip)
        self.machine = machine
        node = Node("peer", self.rank)
        self.trace = TraceFile(Path(self.config.output), node, self.incarnation)
        self.seat = Seat(node, self.incarnation, machine, self, self.trace.write)
        self.hyper = begin.hyper if begin.hyper is not None else model.optimizer.groups
        self.see(begin.view, begin.doors)
        self.await_order()
        self.changes = [tensor._version for tensor in model.tensors]
        self.tell_status()
        return begin.hyper

    def _take_first_parameters(self) -> None:
        """All start with worker 0's values and what its optimizer had learned, or with a checkpoint's."""
        self.values.slot.values.copy_(memory.attach(self.folder / memory.WHOLE, self.layout))
        learned = self.folder / memory.INITIAL_STATE
        if learned.exists():
            states = state.to_torch(load_file(learned), self.layout)
            for tensor, each in zip(self.model.tensors, states, strict=True):
                if each:  # counts of steps stay on the CPU, where torch keeps them
                    self.inner.state[tensor] = {
                        name: value.to(tensor.device) if value.dim() else value for name, value in each.items()
                    }

    def leave(self, well: bool) -> None:
        """This peer ends. If all is well it leaves its parameters and buffers for the average, and says goodbye."""
        self.hands.report()
        if well and self.holds_parameters:
            leave_buffers(self.model.buffers, self.folder, self.rank, self.incarnation)
            self.leave_parameters()
            self.stay()
        elif well:
            self.driver.send(wire.encode(wire.Leave(self.rank, self.incarnation)))
        if hasattr(self, "trace"):
            self.trace.close()
        if hasattr(self, "neighbours"):
            self.neighbours.close()
        self.driver.close()
        self.waiter.close()

    def leave_parameters(self) -> None:
        keeps = self.config.keeps_state
        learned = state.from_torch(self.inner, self.model.tensors, self.layout) if keeps else {}
        path = final_path(self.folder, self.rank, self.incarnation)
        leave_final(path, self.values.fetch(), learned, self.iteration)
        self.changed = False

    def stay(self) -> None:
        """Hear the neighbours until nobody needs this peer. An offer that is out is answered before it is done, and
        those on other hosts have all it said: who hears that it is done waits for nothing more."""
        self.staying = True
        said = False
        while self.staying and not self.driver.gone:
            machine = self.machine
            offers = isinstance(machine, Gossip) and machine.offered != NOBODY
            due = not offers and self.neighbours.all_heard
            if not said and (due or (self.stopping and self.gives_up())):
                said = True
                self.driver.send(wire.encode(wire.Leave(self.rank, self.incarnation, stays=True)))
            self.hear(IDLE_S)
        if self.changed:
            self.leave_parameters()
            self.driver.send(wire.encode(wire.Leave(self.rank, self.incarnation)))

    # One step.

    def exchange(self, gradients: Sequence[Tensor | None], hyper: tuple[Hyper, ...]) -> None:
        """Hand a gradient in; return when the model holds the parameters of the next iteration."""
        self.check_whole(gradients)
        finite = all(is_finite(gradient) for gradient in gradients if gradient is not None)
        refusal = "" if finite else "the gradient is not finite"
        if refusal:
            self.driver.send(wire.encode(wire.Rejected(self.rank, self.iteration, refusal)))
        self.hand_in(refusal, hyper)

    def skip(self, hyper: tuple[Hyper, ...]) -> None:
        """An iteration without a gradient: parameters are exchanged all the same."""
        self.hand_in("the peer skipped this step", hyper)

    def check_whole(self, gradients: Sequence[Tensor | None]) -> None:
        """Refuse what would go wrong in silence: this is not the process or not the model that was described."""
        if os.getpid() != self.pid:
            raise PacelineError(f"worker {self.rank} called step in a child process: only the process itself may")
        for index, (entry, gradient) in enumerate(zip(self.layout.entries, gradients, strict=True)):
            if gradient is not None and gradient.layout is not torch.strided:
                raise PacelineError(f"{entry.name} has a sparse gradient: only dense ones can be used")
            if self.values.moved(index) or self.model.tensors[index]._version != self.changes[index]:
                raise PacelineError(
                    f"{entry.name} was changed by the script: once wrapped, parameters are read by other peers at any "
                    "time; load or change them before paceline.Optimizer is made"
                )

    def hand_in(self, refusal: str, hyper: tuple[Hyper, ...]) -> None:
        """A computation is done. With a `refusal` its step is left out, and all else is done."""
        ordered = self.ordered
        assert ordered is not None
        self.ordered = None
        self.dropped[0] = True
        self.hyper = hyper
        self.hear(0.0)
        done = (self.now(), ordered.iteration, ordered.attempt, (self.nbytes,))
        self.tell(GradientRejected(*done, refusal) if refusal else GradientReady(*done))
        self.await_order()
        self.changes = [tensor._version for tensor in self.model.tensors]
        # A gradient that is not finite, or none at all, will not be better next time: its samples are done with.
        self.hands.settle(counted=bool(refusal) or not self.dropped[0])
        if time.monotonic() - self.told_status_s > STATUS_S:
            self.tell_status()
        if self.stopping:
            raise Stopped

    def await_order(self) -> None:
        """Return when the machine orders the next computation."""
        while self.ordered is None:
            self.pass_over_the_done()
            self.hear(IDLE_S)
            if self.ordered is None and time.monotonic() - self.told_status_s > STATUS_S:
                self.trace.flush()
                if self.holds_parameters:
                    self.tell_status()
            if self.stopping and self.gives_up():
                raise Stopped
        self.waits = ""

    def pass_over_the_done(self) -> None:
        """If it waits for nobody but those that are done, it would wait for ever: they are to leave."""
        behind = self.machine.behind() if isinstance(self.machine, Peer) else []
        processes = {(rank, self.neighbours.members[rank]) for rank in behind}
        if processes <= self.done:
            for process in sorted(processes - self.passed_over):
                self.driver.send(wire.encode(wire.Without(*process)))
            self.passed_over |= processes

    def gives_up(self) -> bool:
        """A run that is to end does not wait long for anybody, and not at all for who has nothing to leave."""
        return not self.holds_parameters or time.monotonic() - self.told_to_stop_s > PATIENCE_S

    def tell_status(self) -> None:
        self.told_status_s = time.monotonic()
        status = wire.WorkerStatus(self.iteration, self.waits, self.staleness)
        self.driver.send(wire.encode(wire.PeerStatus(self.rank, self.incarnation, status, self.hyper)))

    # Hearing.

    def hear(self, timeout_s: float) -> None:
        """Take what neighbours and the driver have said, neighbours first."""
        ready = self.waiter.wait(0.0 if self.neighbours.heard_some or self.driver.heard_some else timeout_s)
        orders = []
        if self.driver in ready or self.driver.heard_some:
            while (message := self.driver.receive()) is not None:
                orders.append(wire.decode_to_worker(message))
        if any(isinstance(order, wire.NewView | wire.Done) for order in orders):
            self.neighbours.hear_all()
        for said in self.neighbours.read():
            self.tell(event_of(said, self.now()))
        for order in orders:
            self.obey(order)

    def await_driver(self) -> None:
        """Hear what is said next, if something is soon: a sampler waits for its hand."""
        self.hear(IDLE_S)

    def obey(self, message: wire.ToWorker) -> None:
        match message:
            case wire.NewView(view, doors):
                self.see(view, doors)
            case wire.Done(processes):
                self.done.update(processes)
            case wire.Stop():
                self.stopping = True
                self.told_to_stop_s = time.monotonic()
            case wire.Dealt():
                self.hands.take(message)
            case wire.Refuse(reason):
                raise PacelineError(reason)

    def see(self, view: View, doors: Sequence[Door]) -> None:
        """Take a newer view, and where its members are."""
        if view.number <= self.view.number:
            return
        self.view = view
        members = dict(view.members)
        if members.get(self.rank) != self.incarnation:
            if self.staying:
                self.staying = False
                return
            raise PacelineError(f"peer {self.rank} was given up: it is no member of view {view.number} any more")
        self.neighbours.change(members, doors)
        self.tell(ViewChanged(self.now(), view))
        self.neighbours.mail.keep_only(members)

    def tell(self, event: Event) -> None:
        self.seat.tell(event)
        self.neighbours.post()

    # What the machine orders.

    def compute(self, action: Compute) -> None:
        self.ordered = action
        self.holds_parameters = True

    def send(self, action: Send) -> None:
        message = action.message
        if not isinstance(message, Update | Token | Ack | Hello | Offer | Reply):
            raise NoSuchAction(f"a peer cannot {action}")
        self.neighbours.write(action.to.rank, message, self.values.name)

    def reduce(self, action: Reduce) -> None:
        mail = self.neighbours.mail
        self.changed = True
        self.values.average(action.own, [mail.held[handle] for handle in action.handles], action.weights)
        self.staleness = max((max(0, action.iteration - handle.iteration) for handle in action.handles), default=0)
        for handle in action.handles:
            mail.let_go(handle)

    def apply(self, action: Apply) -> None:
        self.changed = True
        self.values.step(self.step)
        self.dropped[0] = False

    def drop(self, action: Drop) -> None:
        if action.handle.source != self.rank:
            self.neighbours.mail.let_go(action.handle)

    def wait(self, action: Wait) -> None:
        self.waits = action.reason

    # What the optimizer and the session ask of whoever takes part.

    def forget_staged(self) -> None:
        """Nothing is staged: there is no overlap."""

    def slow_down(self, started: float) -> None:
        """Make the iteration that began at `started` as long as the scenario says, and let its faults strike."""
        self.hindrance.slow_down(started)
        self.hindrance.strike(self.iteration)
        self.pass_slow_link()

    def pass_slow_link(self) -> None:
        """A scenario's slow connection takes its time."""
        self.hindrance.pass_link(self.nbytes)

    def log(self, values: dict[str, float]) -> None:
        iteration, updates = (self.iteration, self.machine.version) if hasattr(self, "machine") else (0, 0)
        self.driver.send(wire.encode(wire.Log(self.rank, self.now(), iteration, updates, values)))


def refuse(model: Described, overlap: bool) -> None:
    """Refuse, in one line, what only servers can do."""
    if overlap:
        raise ConfigError("overlap=True sends gradients to servers while backward runs: this policy has no servers")
    if model.optimizer.extras.ema is not None:
        raise ConfigError("ema is a moving average that servers keep: this policy has no servers")
