"""The world a script runs in: a worker of a live run, or, without a launcher, a world of one.

`paceline.init()` finds out which from the environment: `paceline run`, torchrun and Slurm each say so there. In a
world of one nothing is started and no socket is opened: the script trains in its own process as if paceline were not
there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline import metric_names
from paceline.errors import PacelineError
from paceline.runtime.live.system.process_setup import JOINED
from paceline.runtime.live.system.training_end import TrainingEnd

if TYPE_CHECKING:
    import torch

    from paceline.core.local_steps import LocalSteps
    from paceline.core.policy import Policy
    from paceline.runtime.live.protocol import wire
    from paceline.runtime.live.trainer.model_description import ModelDescription
    from paceline.runtime.live.trainer.participant import Participant
    from paceline.runtime.live.trainer.run_connection import RunConnection


class World:
    """Who this process is among the workers. `run` is None in a world of one, and in a process that a worker started.

    Such a process, of a `DataLoader` for example, has the worker's rank, but no part in the run.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, run: RunConnection | None = None, worker: int | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.run = run
        """The run this process was started for; None in a world of one."""
        self.live: Participant | None = None
        """This process's part in the run, once `paceline.Optimizer` is made."""
        self.worker = os.getpid() if run is not None else worker
        """The process that takes part in a run; None in a world of one."""
        self.logged: list[dict[str, float]] = []
        """What `log` was given, in a world of one."""
        self._end = TrainingEnd()

    @property
    def end(self) -> TrainingEnd:
        """True once this process trains no more."""
        return self.live.participation.end if self.live is not None else self._end

    @property
    def stopping(self) -> bool:
        """Whether no further iteration is to begin."""
        return self.live.participation.stopping if self.live is not None else bool(self._end)

    def check_is_mine(self, deed: str) -> None:
        """Refuse what only the worker itself may do."""
        if not self.is_mine:
            raise PacelineError(f"a process that worker {self.rank} has started {deed}: only the worker itself may")

    @property
    def is_mine(self) -> bool:
        """False in a process that the worker has started, or forked."""
        return self.worker in (None, os.getpid())

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size})"


_world: World | None = None

LAUNCHED = {"TORCHELASTIC_RUN_ID", "SLURM_PROCID"}
"""What torchrun and Slurm say to the processes they start."""


def init() -> World:
    """Join the run this process was started for; without one, be a world of one. Calling it again is harmless."""
    global _world
    if _world is None:
        if os.environ.get(JOINED):
            worker, rank, size = map(int, os.environ[JOINED].split())
            _world = World(rank, size, worker=worker)
        elif "PACELINE_FOLDER" in os.environ:
            from paceline.runtime.live.trainer.run_connection import RunConnection

            run = RunConnection.from_environment(os.environ)
            _world = World(run.rank, run.config.members.workers, run)
        elif LAUNCHED & os.environ.keys():
            _world = _join_launched()
        else:
            _world = World()
        if _world.run is not None:
            os.environ[JOINED] = f"{os.getpid()} {_world.rank} {_world.size}"
    return _world


def _join_launched() -> World:
    """torchrun or Slurm has started this process; if it alone, it is a world of one."""
    from paceline.runtime.live.launchers.launcher_environment import read_place

    place = read_place(os.environ)
    if place is None or place.size == 1:
        return World()
    from paceline.runtime.live.launchers.launcher_worker import LauncherWorker

    return World(place.rank, place.size, LauncherWorker(place, leave).join())


def run_of_worker() -> RunConnection | None:
    """The run of this process, in which an optimizer is about to be made; None in a world of one."""
    here = init()
    here.check_is_mine("made a paceline.Optimizer")
    if here.live is not None:
        raise PacelineError(
            "a worker has one paceline.Optimizer: give several torch optimizers to paceline.optimizers(...) at once"
        )
    return here.run


def take_part(
    run: RunConnection,
    model: ModelDescription,
    policy: Policy | None,
    overlap: bool,
    inner: torch.optim.Optimizer,
    step: Callable[[], None],
) -> tuple[Participant, wire.Begin]:
    """Returns this process's part in its run, and how the run begins, or goes on, with it.

    It is a peer, which steps `inner` here, if there are no servers; else a worker.
    """
    from paceline.runtime.live.peer.startup import begin_peer, is_for_peers
    from paceline.runtime.live.worker.startup import begin_worker

    here = world()
    if is_for_peers(run.config, policy):
        here.live, begin = begin_peer(run, model, policy, overlap, inner, step)
    else:
        here.live, begin = begin_worker(run, model, policy, overlap)
    return here.live, begin


def take_part_in_rounds(
    run: RunConnection,
    model: ModelDescription,
    policy: Policy | None,
    inner: torch.optim.Optimizer,
    step: Callable[[], None],
    local: LocalSteps,
) -> tuple[Participant, wire.Begin]:
    """Returns this process's part in a run with local steps, and how the run begins, or goes on, with it.

    `step` steps `inner` on the gradients of a local step. Without servers the outer optimizer steps here, too.
    """
    from paceline.runtime.live.trainer.inner_state import InnerState
    from paceline.runtime.live.trainer.local_rounds import LocalRounds, anchor_of

    anchor = anchor_of(model)
    groups = range(len(model.optimizer.groups))
    in_groups = list(zip(model.layout.entries, anchor, strict=True))
    outer = model.optimizer.build([[tensor for entry, tensor in in_groups if entry.group == group] for group in groups])
    exchanger, begin = take_part(run, replace(model, tensors=anchor), policy, False, outer, lambda: outer.step())
    inner_state = InnerState(run, inner, model.tensors, model.layout)
    if begin.resumed and run.incarnation == 0:
        inner_state.restore()
    world().live = rounds = LocalRounds(exchanger, model, anchor, step, local, inner_state)
    return rounds, begin


def world() -> World:
    """The world of this process, as `init` found it; a world of one before that."""
    return _world if _world is not None else World()


def leave(well: bool) -> None:
    """Close this worker's part. Called when its script or function ends, well or not."""
    if _world is not None and _world.is_mine and (part := _world.live or _world.run) is not None:
        part.leave(well)
    forget()


def forget() -> None:
    """Start without a world: a forked worker is not what its parent was."""
    global _world
    _world = None
    os.environ.pop(JOINED, None)


def barrier() -> None:
    """Wait until every live worker has called it too. Workers that are lost, or whose scripts have ended, do not count.

    Training goes on meanwhile where others are still at it, and nobody waits for the gradients of those who wait here:
    the parameters may be newer afterwards, and `opt.global_step` larger.
    """
    here = init()
    here.check_is_mine("called paceline.barrier")
    if here.run is None:
        return
    if here.live is not None:
        here.live.participation.leases.check_caller("paceline.barrier() was called")
        here.live.wait_in_barrier()
    else:
        from paceline.runtime.live.trainer.barrier_wait import wait_before_training

        wait_before_training(here.run)


def has_begun() -> bool:
    """Returns whether the run of this process trains already, with it or without."""
    from paceline.runtime.live.trainer.startup import BEGUN

    run = init().run
    return run is not None and (run.folder / BEGUN).exists()


def retire() -> None:
    """Train no more: nobody waits for this worker from now on, and the script goes on."""
    if (live := world().live) is not None:
        live.retire()


def stop() -> None:
    """End the run, for all: every worker finishes the iteration it is in, and nobody begins another.

    Then `step` ends the script, as when a target is reached; a script that looks at `opt.done` goes on after its loop.
    """
    here = init()
    here.check_is_mine("called paceline.stop")
    if here.run is None:
        here.end.note()
    elif here.live is None:
        raise PacelineError("paceline.stop() was called before paceline.Optimizer was made: no run has begun yet")
    else:
        here.live.participation.ask_to_end(here.live.iteration)


def log(**values: Any) -> None:
    """Record metrics under any names: `paceline.log(loss=..., accuracy=..., val_loss=...)`.

    A value is a number, or a tensor without dimensions. They make the run's history, and what its target is about.
    """
    numbers = metric_names.checked(values)
    here = world()
    if (part := here.live or here.run) is not None and here.is_mine:
        part.log(numbers)
    else:
        here.logged.append(numbers)
