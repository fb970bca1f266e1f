"""Rounds of local steps: the script's own optimizer steps here, and every so many steps the process exchanges.

A `LocalRounds` stands before a worker, or before a peer, whose iterations are its rounds (`core/local_steps.py`). To
that one, its machine, its memory and its links the model is the *anchor*, the parameters as they last came from the
others: tensors of their own, which lie where a model's would, be it in the segment, in the server's vector, in a peer's
slot or on a GPU. The script's model keeps the memory it has. At the end of a round its tensors become the outer
gradient in place, which travels like any gradient, and then get the new anchor: so a round costs one copy of the model
more than an iteration. Servers step on outer gradients with the outer optimizer; a peer does so itself, on the average.

What belongs to a gradient belongs to the local step: clipping, schedules, scaled and skipped steps, NaN and Inf. What
belongs to an iteration belongs to the round: its samples are settled with it (`trainer/sample_leases.py`), what it
weighs is the sum of what its steps weigh, and what is dropped, or lost with this process, is the round. A round ends
early when the run is to end, when the script waits in `paceline.barrier()`, and when it comes to its own end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.core.control.round_planner import RoundBegun
from paceline.core.local_steps import LocalSteps
from paceline.core.rounds import Rounds
from paceline.runtime.live.protocol import round_messages, wire
from paceline.runtime.live.system.training_end import Stopped
from paceline.runtime.live.trainer.inner_state import InnerState
from paceline.runtime.live.trainer.model_description import ModelDescription
from paceline.runtime.live.trainer.participant import Participant
from paceline.runtime.live.trainer.step_checks import check_process
from paceline.tensors.fused_kernels import are_finite
from paceline.tensors.piece_optimizers import Hyper


class LocalRounds:
    """A process's part in a run with local steps; `trainer/participant.py` describes its methods."""

    steps_here = True

    def __init__(
        self,
        exchanger: Participant,
        model: ModelDescription,
        anchor: list[Tensor],
        step: Callable[[], None],
        local: LocalSteps,
        inner_state: InnerState,
    ) -> None:
        """`exchanger` takes the anchor for the model; `step` steps the inner optimizer on the model's gradients."""
        self.exchanger = exchanger
        self.run = exchanger.run
        self.participation = exchanger.participation
        self.clock = exchanger.clock
        """What it measures is of rounds: all their steps are one part, computing."""
        self.participation.leases.by_rounds = True
        self.participation.plan_round = lambda order: self.rounds.hear(order, self.run.now())
        self.tensors = model.tensors
        self.anchor = anchor
        self.step = step
        self.rounds = Rounds(local)
        self.inner_state = inner_state
        self.hyper = model.optimizer.groups
        """The outer optimizer's hyper-parameters, which nobody changes."""
        self.steps_before = steps_of(exchanger.iteration, local, inner_state.steps)
        """The local steps before this round: of a joiner, those of the rounds it has missed, as far as they are known.
        """
        self.weight = 0.0
        """How many samples the steps of this round have used."""
        self.take_anchor()
        self.begin_round()

    @property
    def iteration(self) -> int:
        """The local step that is to be computed."""
        return self.steps_before + self.rounds.steps

    @property
    def steps_since_exchange(self) -> int:
        return self.rounds.steps

    @property
    def version(self) -> int:
        return self.exchanger.version

    @property
    def dropped(self) -> Sequence[bool]:
        return self.exchanger.dropped

    # Steps.

    def run_closure(self, closure: Callable[[], Any], started: float) -> Any:
        return closure()  # no policy with local steps gives computations up

    def note_missing_closure(self) -> None:
        """A step comes without a closure, which no policy with local steps minds."""

    def forget_gradients(self) -> None:
        """The script is about to clear the gradients, of which nothing is kept."""
        self.clock.prepared()

    def fetch_state(self) -> Sequence[Mapping[str, Tensor]]:
        return ()

    def exchange(
        self,
        gradients: Sequence[Tensor | None],
        hyper: tuple[Hyper, ...],
        weight: float | None = None,
        steps: int = 1,
    ) -> None:
        """Takes a local step; if it is the last of its round, returns when the model has the next anchor."""
        check_process(self.run)
        if are_finite([gradient for gradient in gradients if gradient is not None]):
            self.step()
            self.weight += self.participation.leases.weight() if weight is None else weight
        else:
            self.run.send(wire.Rejected(self.run.rank, self.iteration, "the gradient is not finite"))
        self._end_step()

    def skip(self, hyper: tuple[Hyper, ...]) -> None:
        """Counts a local step that changes nothing."""
        check_process(self.run)
        self._end_step()

    def _end_step(self) -> None:
        leases, now = self.participation.leases, self.run.now()
        leases.note_step(now - self.rounds.last)
        leases.hold()
        self.exchanger.hear()
        if self.rounds.end_step(now) or self.participation.stopping:
            self.end_round()

    def end_round(self) -> None:
        """Pushes what the round has learned; returns when the model has what the others make of it."""
        outer = [tensor.detach() for tensor in self.tensors]
        torch._foreach_neg_(outer)
        torch._foreach_add_(outer, self.anchor)
        weight, steps = self.weight, self.rounds.steps
        self.steps_before += steps
        self.weight, self.rounds.steps = 0.0, 0
        self.exchanger.pass_slow_link()
        try:
            if weight > 0:
                for anchor, gradient in zip(self.anchor, outer, strict=True):
                    anchor.grad = gradient  # where a peer's outer optimizer looks for it
                self.exchanger.exchange(outer, self.hyper, weight, steps)
            else:
                self.exchanger.skip(self.hyper)
        finally:
            self.take_anchor()
        self.exchanger.pass_slow_link()
        self.inner_state.save_if_due(self.iteration)
        self.begin_round()

    def take_anchor(self) -> None:
        """Has the model hold what came from the others last."""
        for anchor in self.anchor:
            anchor.grad = None
        torch._foreach_copy_([tensor.detach() for tensor in self.tensors], self.anchor)

    def begin_round(self) -> None:
        """The model has its parameters: a round begins, and who plans its length is told."""
        rounds, now = self.rounds, self.run.now()
        rounds.begin(now)
        if rounds.local.is_planned:
            begun = RoundBegun(now, self.run.rank, self.run.incarnation, rounds.number, rounds.pace.step_s)
            self.run.send(round_messages.Begun(begun))

    def _end_last_round(self) -> None:
        """Ends the round that the script is in, if it is in one."""
        if self.rounds.steps:
            with contextlib.suppress(Stopped):
                self.end_round()

    def slow_down(self, started: float) -> None:
        """Makes the local step that began at `started` as long as the scenario says, and lets its faults strike."""
        scenario, iteration = self.run.scenario, self.exchanger.iteration
        if scenario.scenario is None:
            return
        scenario.slow_down(started, self.participation.leases.relative_batch())
        local = self.rounds.local
        if 2 * (self.rounds.steps + 1) > max(local.steps, local.at_least):  # in the middle of the round
            scenario.inject_faults(iteration)
        for want in scenario.wanted_servers(iteration):
            self.run.send(want)

    def pass_slow_link(self) -> None:
        """A local step sends nothing; `end_round` takes a slow connection's time."""

    def hear(self) -> None:
        self.exchanger.hear()

    def after_load(self, follow: Callable[[], None]) -> None:
        self.exchanger.after_load(follow)

    # What else the script asks for.

    def log(self, values: dict[str, float]) -> None:
        self.run.log(values, self.iteration, self.version)

    def wait_in_barrier(self) -> None:
        """`paceline.barrier()`: hands in the round so far, then waits as others do."""
        if self.participation.end or self.participation.barrier.in_step:
            self.exchanger.wait_in_barrier()
            return
        self._end_last_round()
        self.exchanger.wait_in_barrier()
        self.take_anchor()
        self.begin_round()

    # Leaving.

    def retire(self) -> None:
        if not self.participation.end:
            self._end_last_round()
            self.exchanger.retire()

    def leave(self, well: bool) -> None:
        if well:
            if not self.participation.end:
                self._end_last_round()
            self.inner_state.save(self.iteration)
        self.exchanger.leave(well)


def steps_of(rounds: int, local: LocalSteps, kept: int) -> int:
    """Returns how many local steps there were in so many rounds; `kept` is what was written down with an inner state.

    That may be of a later round than the checkpoint; and a round that ended early had fewer steps than others.
    """
    usual = rounds * (local.steps or local.at_least)
    if not kept:
        return usual
    return min(kept, usual) if local.rule == "steps" else kept


def anchor_of(model: ModelDescription) -> list[Tensor]:
    """Returns tensors that hold what the model does, for the anchor."""
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in model.tensors]
