"""Carries out what a worker's machine orders: messages to servers and scheduler, rests, and computations.

A computation is the script's business, so it ends `await_order`: then `step` returns, and the script computes. All
links are read here, in the thread that calls `step`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.core.actions import AbortCompute, Compute, Send, SetTimer
from paceline.core.events import ComputeAborted, GradientReady, ResyncArrived, TimerFired
from paceline.core.messages import Node, Notify, Pull, Push, Resync
from paceline.core.scheduler import SCHEDULER
from paceline.core.worker import Worker
from paceline.runtime.execution import MachineRunner, NoSuchAction
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.storage.trace_files import TraceFile
from paceline.runtime.live.trainer.run_connection import RunConnection
from paceline.runtime.live.trainer.step_clock import StepClock
from paceline.runtime.live.worker.driver_orders import IDLE_S, DriverOrders
from paceline.runtime.live.worker.server_connections import ServerConnections
from paceline.runtime.live.worker.worker_memory import WorkerMemory
from paceline.tensors.piece_optimizers import Hyper


class WorkerExecutor:
    """Does what one worker's machine orders, until it orders to compute."""

    def __init__(self, run: RunConnection, machine: Worker, memory: WorkerMemory) -> None:
        self.run = run
        self.machine = machine
        self.memory = memory
        node = Node("worker", run.rank)
        self.trace = TraceFile(Path(run.config.output), node, run.incarnation)
        self.clock = StepClock(run, node)
        self.runner = MachineRunner(node, run.incarnation, machine, self, self.trace.write)
        self.connections = ServerConnections(run, machine, memory, self.runner.deliver)
        self.orders = DriverOrders(run, self.connections, self.runner.deliver)
        self.to_scheduler: list[Pull | Notify] = []
        self.ordered: Compute | None = None
        """The computation that the script is in."""
        self.ordered_at = 0.0
        """When the parameters for it were there."""
        self.timer: tuple[float, int] | None = None
        """When the worker is to pull, if it rests before: naive waiting."""
        self.loaded: Callable[[], None] = lambda: None
        """Called when the model's tensors have got parameters."""
        self.stretched: Compute | None = None
        """The computation that was last made as long as the scenario says."""

    # What the script does.

    def push(
        self, absent: tuple[int, ...], hyper: tuple[Hyper, ...] | None, refusal: str, weight: float, steps: int = 1
    ) -> None:
        """Pushes what was written, and pulls; returns when the parameters of the next iteration are in the model."""
        self.wait_while_held()
        ordered = self.ordered
        assert ordered is not None
        self.ordered = None
        changed = self.connections.change_hyper(hyper)
        self.memory.commit()
        self.clock.copied()
        sizes, now = self.connections.slice_bytes, self.run.now()
        self.orders.participation.leases.note_step(now - self.ordered_at)
        self.runner.deliver(GradientReady(now, ordered.iteration, ordered.attempt, sizes, weight, steps))
        self.flush(absent, changed, refusal)
        self.clock.pushed()
        self.await_order()
        self.memory.release()
        self.orders.hear_if_due()
        self.clock.answered(ordered.iteration)

    def begin_again(self) -> None:
        """The computation that was ordered is given up: returns when fresh parameters for it are there."""
        ordered = self.ordered
        assert ordered is not None
        self.memory.settle()
        resync = Resync(self.run.rank, self.run.incarnation, ordered.iteration)
        self.runner.deliver(ResyncArrived(self.run.now(), resync))
        self.ordered = None
        self.runner.deliver(ComputeAborted(self.run.now(), ordered.iteration, ordered.attempt))
        self.flush()
        self.await_order()

    def stretch(self, started: float, look: Callable[[], None] | None = None) -> None:
        """Makes the computation as long as the scenario says, once; calls `look` now and then meanwhile."""
        if self.stretched is not self.ordered:
            self.stretched = self.ordered
            batch = self.orders.participation.leases.relative_batch()
            self.run.scenario.slow_down(started, batch, look)

    # Waiting.

    def wait_while_held(self) -> None:
        """If the driver wants nothing to be under way, the servers being about to change, waits until they have.

        Everything pushed so far is answered, and no server has the gradient that was written.
        """
        self.orders.hear_if_due()
        while self.orders.hold.applies_to(self.machine.iteration):
            self.orders.await_driver()
            self.trace.flush()
            self.orders.participation.check_patience()

    def await_order(self) -> None:
        """Returns when the machine orders a computation, and the model holds the parameters for it.

        All shards must answer before that, so it does not matter whom we hear first. An answer may lead to another
        pull, of the same shard too.
        """
        while self.ordered is None:
            if self.timer is not None:
                self.rest(*self.timer)
            elif self.machine.pausing:  # the scheduler decides
                self.orders.await_driver()
                self.flush()
                self.orders.participation.check_patience()
            elif self.connections.receive_any(self.machine.waiting, IDLE_S):
                if self.connections.outbox or self.to_scheduler:
                    self.flush()
            else:
                gone = [shard for shard in self.machine.waiting if self.connections.links[shard].gone]
                if len(gone) == len(self.machine.waiting):
                    self.run.waiter.wait(IDLE_S)  # the driver says when they are back
                for shard in gone:
                    self.connections.reconnect(shard)
                self.orders.hear()
                self.trace.flush()
                self.orders.participation.check_patience()
        self.memory.load()
        self.loaded()
        self.ordered_at = self.run.now()

    def rest(self, due: float, timer: int) -> None:
        """Naive waiting: pulls when the time is over, or the run ends. The driver is heard meanwhile."""
        remaining = due - self.run.now()
        if remaining > 0 and not self.orders.participation.stopping:
            self.run.waiter.wait(min(remaining, IDLE_S))
            self.orders.hear()
        else:
            self.timer = None
            self.runner.deliver(TimerFired(self.run.now(), timer))
            self.flush()

    def flush(self, absent: tuple[int, ...] = (), hyper: tuple[Hyper, ...] | None = None, refusal: str = "") -> None:
        """Sends what the machine has ordered."""
        self.connections.flush(absent, hyper, refusal)
        for said in self.to_scheduler:
            self.run.send(wire.Ask(said))
        self.to_scheduler.clear()

    def close(self) -> None:
        self.trace.close()
        self.clock.close()
        self.memory.close()
        self.connections.close()
        self.run.close()

    # What the machine orders.

    def compute(self, action: Compute) -> None:
        self.ordered = action

    def abort_compute(self, action: AbortCompute) -> None:
        """Nothing is left to do: the machine hears of a re-sync after the computation was given up."""

    def send(self, action: Send) -> None:
        message = action.message
        if action.to == SCHEDULER and isinstance(message, Pull | Notify):
            self.to_scheduler.append(message)
        elif isinstance(message, Push | Pull):
            self.connections.defer(action.to.rank, message)
        else:
            raise NoSuchAction(f"a worker cannot {action}")

    def set_timer(self, action: SetTimer) -> None:
        self.timer = (self.run.now() + action.after_s, action.timer)
