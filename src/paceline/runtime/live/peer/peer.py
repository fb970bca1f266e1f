"""A peer of a live run, inside the user's process: a worker without servers.

The user's own optimizer steps here. `exchange` hands a gradient in and returns when the machine orders the next
computation; what the machine orders in between (average, step, send) is done here (`peer/peer_executor.py`), in the
thread that calls `step`. While the script computes a peer under Hop hears nobody, and need not: what neighbours send
waits in their slots (`peer/parameter_slots.py`) and in the socket, and only a peer that joins waits for the next step.
AD-PSGD's neighbours do wait for an answer, so there a thread hears them while the script computes
(`peer/responder.py`). A peer whose script has ended stays for its neighbours (`peer/departure.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.adpsgd_peer import ADPSGDPeer
from paceline.core.events import GradientReady, GradientRejected
from paceline.core.hop_peer import HopPeer
from paceline.core.messages import Node, View
from paceline.errors import PacelineError
from paceline.runtime.execution import MachineRunner
from paceline.runtime.live.peer.departure import Departure, FinalValues
from paceline.runtime.live.peer.event_loop import IDLE_S, EventLoop, MembershipState
from paceline.runtime.live.peer.neighbours import Neighbours
from paceline.runtime.live.peer.peer_executor import PeerExecutor
from paceline.runtime.live.peer.peer_parameters import PeerParameters
from paceline.runtime.live.peer.responder import Responder
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.configuration import Endpoint
from paceline.runtime.live.storage.trace_files import TraceFile
from paceline.runtime.live.system.training_end import Stopped
from paceline.runtime.live.trainer.barrier_wait import REASON
from paceline.runtime.live.trainer.model_description import ModelDescription
from paceline.runtime.live.trainer.participation import Participation
from paceline.runtime.live.trainer.run_connection import RunConnection
from paceline.runtime.live.trainer.step_checks import check_process, check_tensors
from paceline.runtime.live.trainer.step_clock import StepClock
from paceline.tensors.fused_kernels import are_finite
from paceline.tensors.piece_optimizers import Hyper

STATUS_S = 0.5


class LivePeer:
    """A process's part in a run without servers; `trainer/participant.py` describes its methods."""

    steps_here = True

    def __init__(
        self,
        run: RunConnection,
        model: ModelDescription,
        neighbours: Neighbours,
        begin: wire.Begin,
        machine: HopPeer | ADPSGDPeer,
        inner: torch.optim.Optimizer,
        step: Callable[[], None],
    ) -> None:
        """`step` steps `inner`, on the gradients that are there."""
        self.run = run
        self.layout = model.layout
        self.nbytes = model.layout.numel * model.layout.itemsize
        self.machine = machine
        self.first_iteration = begin.iteration
        """The iteration of the run that this peer's iteration 0 is."""
        self.hyper = begin.hyper if begin.hyper is not None else model.optimizer.groups
        self.status_sent_s = 0.0
        self.ordered_at = 0.0
        """When the parameters of the iteration that is computed were there."""
        self.participation = Participation(run, self.await_driver)
        self.neighbours = neighbours
        self.parameters = PeerParameters(model.tensors, neighbours.slot_pool)
        self.executor = PeerExecutor(run.rank, neighbours, self.parameters, step)
        node = Node("peer", run.rank)
        self.trace = TraceFile(Path(run.config.output), node, run.incarnation)
        self.clock = StepClock(run, node)
        runner = MachineRunner(node, run.incarnation, machine, self.executor, self.trace.write)
        self.events = EventLoop(run, neighbours, runner, self.participation)
        self.responder = Responder(self.events.hear, run.waiter, run.driver)
        final = FinalValues(run, model, inner, self.executor)
        self.departure = Departure(self.events, self.participation, final, lambda: self.iteration)

    @property
    def iteration(self) -> int:
        return self.first_iteration + self.machine.iteration

    @property
    def dropped(self) -> Sequence[bool]:
        return (self.executor.dropped,)

    def begin(self, view: View, endpoints: Sequence[Endpoint]) -> None:
        """Joins the members of this view; returns when the first computation is ordered."""
        self.parameters.load()
        self.events.see(view, endpoints)
        self._await_order()
        self._send_status()
        self.clock.introduce(("memory",) if self.run.config.multihost is None else ("tcp",))
        answers_meanwhile = isinstance(self.machine, ADPSGDPeer)
        self.parameters.begin_computation(answers_meanwhile)
        if answers_meanwhile:
            self.responder.start()

    # Steps.

    def run_closure(self, closure: Callable[[], Any], started: float) -> Any:
        return closure()  # no policy of peers gives computations up

    def note_missing_closure(self) -> None:
        """A step comes without a closure, which no policy of peers minds."""

    def forget_gradients(self) -> None:
        """The script is about to clear the gradients, of which nothing is kept."""
        self.clock.prepared()

    def after_load(self, follow: Callable[[], None]) -> None:
        """Nothing is loaded from servers: parameters in half precision are refused before."""

    def fetch_state(self) -> Sequence[dict[str, Tensor]]:
        return ()

    def hear(self) -> None:
        with self.responder.paused():
            self.events.hear(0.0)

    def exchange(
        self,
        gradients: Sequence[Tensor | None],
        hyper: tuple[Hyper, ...],
        weight: float | None = None,
        steps: int = 1,
    ) -> None:
        check_process(self.run)
        if weight is not None and isinstance(self.machine, ADPSGDPeer):
            raise PacelineError("adpsgd averages two peers in equal parts: step(weight=...) is not for it")
        because = "parameters are read by other peers at any time"
        check_tensors(self.layout, gradients, self.parameters.first_changed(), because)
        finite = are_finite([gradient for gradient in gradients if gradient is not None])
        refusal = "" if finite else "the gradient is not finite"
        if refusal:
            self.run.send(wire.Rejected(self.run.rank, self.iteration, refusal))
        self._hand_in(refusal, hyper, self.participation.leases.weight() if weight is None else weight, steps)

    def skip(self, hyper: tuple[Hyper, ...]) -> None:
        check_process(self.run)
        self._hand_in("the peer skipped this step", hyper)

    def slow_down(self, started: float) -> None:
        self.run.scenario.slow_down(started, self.participation.leases.relative_batch())
        self.run.scenario.inject_faults(self.iteration)
        self.pass_slow_link()

    def pass_slow_link(self) -> None:
        self.run.scenario.pass_link(self.nbytes)

    def log(self, values: dict[str, float]) -> None:
        self.run.log(values, self.iteration, self.version)

    @property
    def version(self) -> int:
        """The updates in this peer's parameters."""
        return self.machine.version

    def _hand_in(self, refusal: str, hyper: tuple[Hyper, ...], weight: float = 1.0, steps: int = 1) -> None:
        """A computation is done. With a `refusal` its step is left out, and all else is done."""
        with self.responder.paused():
            self.parameters.end_computation()
            try:
                self._complete_iteration(refusal, hyper, weight, steps)
            finally:
                self.parameters.begin_computation(self.responder.started)
        if self._status_is_due():
            self._send_status()
        if self.participation.stopping:
            raise Stopped(whole=True)

    def _complete_iteration(self, refusal: str, hyper: tuple[Hyper, ...], weight: float, steps: int) -> None:
        """Returns when the model has the parameters of the next iteration."""
        ordered = self.executor.take_order()
        self.hyper = hyper
        self.participation.begin_waiting()  # if it was told to stop while it computed, it begins to wait only now
        self.events.hear(0.0)
        now = self.run.now()
        self.clock.copied()
        self.participation.leases.note_step(now - self.ordered_at)
        done = (now, ordered.iteration, ordered.attempt, (self.nbytes,))
        self.events.deliver(GradientRejected(*done, refusal) if refusal else GradientReady(*done, weight, steps))
        self.clock.pushed()
        self._await_order()
        self.clock.answered(ordered.iteration)
        # A gradient that is not finite, or none at all, will not be better next time: its samples are done with.
        if not self.participation.barrier.waits:
            self.participation.leases.settle(counted=bool(refusal) or not self.executor.dropped)

    def _await_order(self) -> None:
        """Returns when the machine orders the next computation."""
        executor, participation = self.executor, self.participation
        while executor.ordered is None:
            self.events.pass_over_done()
            self.events.hear(IDLE_S)
            if executor.ordered is None and self._status_is_due():
                self.trace.flush()
                if executor.holds_parameters:
                    self._send_status()
            # Who has nothing to leave does not wait at all.
            if participation.stopping and (participation.gives_up or not executor.holds_parameters):
                raise Stopped(whole=executor.holds_parameters)
        executor.waits = ""
        self.ordered_at = self.run.now()

    def _status_is_due(self) -> bool:
        return time.monotonic() - self.status_sent_s > STATUS_S

    def _send_status(self) -> None:
        self.status_sent_s = time.monotonic()
        status = wire.WorkerStatus(self.iteration, self.executor.waits, self.executor.staleness)
        self.run.send(wire.PeerStatus(self.run.rank, self.run.incarnation, status, self.hyper))

    # Waiting for others, and the end.

    def await_driver(self) -> None:
        """Hears what the driver says next, if it says something soon: a sampler waits for samples."""
        with self.responder.paused():
            self.events.await_samples()

    def wait_in_barrier(self) -> None:
        barrier = self.participation.barrier
        barrier.enter(self.run)
        while barrier.waits:
            if self.participation.stopping:
                self.retire()
            if not self.participation.end and isinstance(self.machine, HopPeer) and self.machine.is_overtaken:
                self._follow()
            else:
                with self.responder.paused():
                    self.events.hear(IDLE_S)

    def _follow(self) -> None:
        """Does an iteration without a gradient."""
        try:
            self._hand_in(REASON, self.hyper)
        except Stopped as stopped:
            if not stopped.whole:
                raise

    def retire(self) -> None:
        if self.participation.end:
            return
        self.participation.end.note()
        self.departure.begin_leaving()
        with self.responder.paused():
            self.departure.retire()

    def leave(self, well: bool) -> None:
        self.responder.close()
        if well and self.events.membership is not MembershipState.REMOVED:
            self.responder.check()
        self.participation.send_last_reports()
        if well and self.executor.holds_parameters:
            self.departure.stay()
        elif well:
            self.run.send(wire.Leave(self.run.rank, self.run.incarnation))
        self.trace.close()
        self.clock.close()
        self.neighbours.close()
        self.run.close()
