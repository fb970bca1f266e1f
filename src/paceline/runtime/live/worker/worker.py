"""The worker's side of a live run, inside the user's process: what its script calls.

`worker/startup.py` makes it, when the first parameters are there. `exchange` hands a gradient in and returns when the
parameters of the next iteration are there: one message to each shard, one answer from each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from paceline.runtime.live.protocol import wire
from paceline.runtime.live.system.training_end import Stopped
from paceline.runtime.live.trainer.barrier_wait import REASON
from paceline.runtime.live.trainer.model_description import ModelDescription, leave_buffers
from paceline.runtime.live.trainer.step_checks import check_process, check_tensors
from paceline.runtime.live.worker.abortable_step import AbortableStep
from paceline.runtime.live.worker.worker_executor import WorkerExecutor
from paceline.tensors import state
from paceline.tensors.piece_optimizers import Hyper


class LiveWorker:
    """A worker that has begun: its model has parameters, and its script may step."""

    steps_here = False

    def __init__(self, model: ModelDescription, executor: WorkerExecutor, aborting: AbortableStep | None) -> None:
        self.model = model
        self.layout = model.layout
        self.executor = executor
        self.run = executor.run
        self.machine = executor.machine
        self.memory = executor.memory
        self.orders = executor.orders
        self.participation = self.orders.participation
        self.clock = executor.clock
        self.aborting = aborting
        """Under a policy that gives computations up."""

    @property
    def iteration(self) -> int:
        return self.machine.iteration

    @property
    def dropped(self) -> Sequence[bool]:
        """For each shard, whether the last gradient did not count there."""
        return self.machine.dropped

    # Steps.

    def run_closure(self, closure: Callable[[], Any], started: float) -> Any:
        """Runs the closure of a step that began at `started`, again if its computation is given up."""
        try:
            return self.aborting.run(closure, started) if self.aborting is not None else closure()
        except BaseException:
            self.memory.forget()
            raise

    def note_missing_closure(self) -> None:
        """A step comes without a closure, so its computation cannot be given up."""
        if self.aborting is not None:
            self.aborting.warn()

    def forget_gradients(self) -> None:
        """The script is about to clear the gradients: those that backward has left so far will not be pushed."""
        self.clock.prepared()
        self.memory.forget()
        if self.aborting is not None:
            self.aborting.rewind.before_clearing()

    def exchange(
        self,
        gradients: Sequence[Tensor | None],
        hyper: tuple[Hyper, ...],
        weight: float | None = None,
        steps: int = 1,
    ) -> None:
        """Pushes a gradient, of so many local steps; returns when the model has the next iteration's parameters."""
        check_process(self.run)
        check_tensors(self.layout, gradients, self.memory.first_changed(), "parameters belong to the servers")
        refusal = "" if self.memory.write(gradients) else "the gradient is not finite"
        if refusal:
            self.run.send(wire.Rejected(self.run.rank, self.machine.iteration, refusal))
        absent = tuple([index for index, gradient in enumerate(gradients) if gradient is None])
        self.push(absent, hyper, refusal, self.participation.leases.weight() if weight is None else weight, steps)

    def skip(self, hyper: tuple[Hyper, ...]) -> None:
        """Goes on without a gradient: the iteration counts as progress, and nobody waits for it."""
        self.memory.forget()
        self.push((), hyper, "the worker skipped this step")

    def push(
        self,
        absent: tuple[int, ...],
        hyper: tuple[Hyper, ...] | None,
        refusal: str,
        weight: float = 1.0,
        steps: int = 1,
    ) -> None:
        """Pushes what was written, or nothing if there is a `refusal`, and settles the samples of the step."""
        self.executor.push(absent, hyper, refusal, weight, steps)
        # A gradient that is not finite, or none at all, will not be better next time: its samples are done with.
        if not self.participation.barrier.waits:
            self.participation.leases.settle(counted=bool(refusal) or not all(self.machine.dropped))
        if self.participation.stopping:
            raise Stopped(whole=True)

    def slow_down(self, started: float) -> None:
        """Makes the iteration that began at `started` as long as the scenario says, and lets its faults strike."""
        scenario = self.run.scenario
        if scenario.scenario is None:
            return
        self.executor.stretch(started)
        scenario.inject_faults(self.machine.iteration)
        for want in scenario.wanted_servers(self.machine.iteration):
            self.run.send(want)
        self.pass_slow_link()

    def pass_slow_link(self) -> None:
        """Takes the time of a scenario's slow connection."""
        if self.run.scenario.link is not None:
            self.run.scenario.pass_link(sum(self.executor.connections.slice_bytes))

    def hear(self) -> None:
        self.orders.hear_if_due()

    # What else the script asks for.

    def after_load(self, follow: Callable[[], None]) -> None:
        """Has `follow` called whenever the model's tensors have got parameters of the servers."""
        self.executor.loaded = follow

    def fetch_state(self) -> Sequence[dict[str, Tensor]]:
        """Returns what the servers' optimizers have learned about each trained tensor."""
        return state.to_torch(self.executor.connections.fetch_state(self.orders.hear), self.layout)

    def log(self, values: dict[str, float]) -> None:
        self.run.log(values, self.machine.iteration, self.version)

    @property
    def version(self) -> int:
        """The updates in the parameters this worker has read."""
        return self.machine.versions[0]

    def wait_in_barrier(self) -> None:
        """`paceline.barrier()`: returns when all are there. It follows where others wait for it meanwhile."""
        barrier = self.participation.barrier
        barrier.enter(self.run)
        while barrier.waits:
            if self.participation.stopping:
                self.retire()  # so that nobody waits for its pushes any more
            if barrier.awaited >= self.iteration and not self.participation.end:
                self.follow()
            else:
                self.orders.await_driver()
                if not self.participation.end:
                    self.executor.wait_while_held()

    def follow(self) -> None:
        """Pushes an iteration without a gradient; returns when the parameters of the next one are there."""
        self.memory.forget()
        try:
            self.push((), self.executor.connections.sent_hyper, REASON)
        except Stopped as stopped:
            if not stopped.whole:
                raise

    # Leaving.

    def retire(self) -> None:
        """Trains no more: nobody waits for this worker. The script goes on, with the parameters as they are now."""
        if not self.participation.end:
            self.participation.end.note()
            self.participation.leases.report()
            self.memory.read_own()  # others may go on to change what a server steps for all
            self.say_goodbye(retires=True)

    def leave(self, well: bool) -> None:
        """The script has ended. If all is well the buffers are left for the average, and the driver is told."""
        self.participation.send_last_reports()
        if well:
            self.say_goodbye(retires=False)
        if self.aborting is not None:
            self.aborting.close()
        self.executor.close()

    def say_goodbye(self, retires: bool) -> None:
        run = self.run
        leave_buffers(self.model.buffers, run.folder, run.rank, run.incarnation)
        finished = not run.scenario.has_left
        run.send(wire.Leave(run.rank, run.incarnation, self.iteration, finished=finished, retires=retires))
