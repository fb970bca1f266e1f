"""What `paceline.Optimizer` and `paceline.session` need of a process's part in a run: a worker or a peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from paceline.runtime.live.trainer.participation import Participation
from paceline.runtime.live.trainer.run_connection import RunConnection
from paceline.runtime.live.trainer.step_clock import StepClock
from paceline.tensors.piece_optimizers import Hyper


class Participant(Protocol):
    """A process's part in a run: a worker, whose servers step, or a peer, which steps by itself."""

    run: RunConnection
    participation: Participation
    clock: StepClock
    steps_here: bool
    """Whether the script's own optimizer takes the steps, in this process."""

    @property
    def iteration(self) -> int:
        """The iteration that is to be computed."""

    @property
    def version(self) -> int:
        """The updates in the parameters that the model has."""

    @property
    def dropped(self) -> Sequence[bool]:
        """Of each shard: whether the last gradient did not count there."""

    def run_closure(self, closure: Callable[[], Any], started: float) -> Any:
        """Runs the closure of a step that began at `started`, again if its computation is given up."""

    def note_missing_closure(self) -> None:
        """A step comes without a closure."""

    def exchange(
        self,
        gradients: Sequence[Tensor | None],
        hyper: tuple[Hyper, ...],
        weight: float | None = None,
        steps: int = 1,
    ) -> None:
        """Hands a gradient in; returns when the model holds the parameters of the next iteration.

        `weight` says how many samples it stands for; without one those that were drawn for it are counted. An outer
        gradient is of so many local steps.
        """

    def skip(self, hyper: tuple[Hyper, ...]) -> None:
        """Hands in an iteration without a gradient."""

    def forget_gradients(self) -> None:
        """The script is about to clear the gradients: what backward has prepared for sending is dropped."""

    def slow_down(self, started: float) -> None:
        """Makes the iteration that began at `started` as long as the scenario says, and lets its faults happen."""

    def pass_slow_link(self) -> None:
        """Takes the time that the parameters need on a scenario's slow connection."""

    def hear(self) -> None:
        """Hears what the driver says, now and then, while the script is in a round of local steps."""

    def after_load(self, follow: Callable[[], None]) -> None:
        """Has `follow` called whenever the model's tensors have got parameters of the servers."""

    def fetch_state(self) -> Sequence[Mapping[str, Tensor]]:
        """Returns what servers' optimizers have learned about each trained tensor; nothing if there are none."""

    def log(self, values: dict[str, float]) -> None:
        """Sends metrics of the script to the driver."""

    def wait_in_barrier(self) -> None:
        """Returns when all processes of the run wait in `paceline.barrier()`."""

    def retire(self) -> None:
        """Trains no more; the script goes on."""

    def leave(self, well: bool) -> None:
        """The script has ended: leaves the run."""
