"""The world a script runs in: a worker of a live run, or, without a launcher, a world of one.

`paceline.init()` finds out which from the environment: `paceline run`, torchrun and Slurm each say so there. In a
world of one nothing is started and no socket is opened: the script trains in its own process as if paceline were not
there.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.errors import PacelineError

if TYPE_CHECKING:
    import torch

    from paceline.core.policy import Policy
    from paceline.runtime.live.peer.peer import LivePeer
    from paceline.runtime.live.worker.worker import LiveWorker


class World:
    """Who this process is among the workers. `live` is None in a world of one, and in a process that a worker started.

    Such a process, of a `DataLoader` for example, has the worker's rank, but no part in the run.
    """

    def __init__(self, rank: int = 0, size: int = 1, live: LiveWorker | None = None, worker: int | None = None) -> None:
        self.rank = rank
        self.size = size
        self.live: LiveWorker | LivePeer | None = live
        self.worker = os.getpid() if live is not None else worker
        """The process that takes part in a run; None in a world of one."""
        self.logged: list[dict[str, float]] = []
        """What `log` was given, in a world of one."""

    @property
    def is_mine(self) -> bool:
        """False in a process that the worker has started, or forked."""
        return self.worker in (None, os.getpid())

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size})"


_world: World | None = None

LAUNCHED = {"TORCHELASTIC_RUN_ID", "SLURM_PROCID"}
"""What torchrun and Slurm say to the processes they start."""
JOINED = "PACELINE_JOINED"
"""What a worker says to the processes it starts, which have its environment: its number, its rank, and of how many."""


def init() -> World:
    """Join the run this process was started for; without one, be a world of one. Calling it again is harmless."""
    global _world
    if _world is None:
        if os.environ.get(JOINED):
            worker, rank, size = map(int, os.environ[JOINED].split())
            _world = World(rank, size, worker=worker)
        elif "PACELINE_FOLDER" in os.environ:
            from paceline.runtime.live.worker.worker import LiveWorker

            live = LiveWorker.from_environment(os.environ)
            _world = World(live.rank, live.config.members.workers, live)
        elif LAUNCHED & os.environ.keys():
            _world = _join_launched()
        else:
            _world = World()
        if _world.live is not None:
            os.environ[JOINED] = f"{os.getpid()} {_world.rank} {_world.size}"
    return _world


def _join_launched() -> World:
    """torchrun or Slurm has started this process; if it alone, it is a world of one."""
    from paceline.runtime.live.across.rendezvous import read_place

    place = read_place(os.environ)
    if place is None or place.size == 1:
        return World()
    from paceline.runtime.live.across.beside import Beside

    return World(place.rank, place.size, Beside(place).join())


def take_part(
    policy: Policy | None, inner: torch.optim.Optimizer, step: Callable[[], None]
) -> LiveWorker | LivePeer | None:
    """The part this process has in a live run, if any: a peer, which steps `inner` here, if there are no servers."""
    here = init()
    if not here.is_mine:
        raise PacelineError(
            f"a process that worker {here.rank} has started made a paceline.Optimizer: only the worker itself may"
        )
    if here.live is None:
        return None
    from paceline.runtime.live.peer.peer import LivePeer, is_for_peers
    from paceline.runtime.live.worker.worker import LiveWorker

    if isinstance(here.live, LivePeer):
        raise PacelineError("a worker has one paceline.Optimizer: give it all parameters, in groups if need be")
    if isinstance(here.live, LiveWorker) and is_for_peers(here.live.config, policy):
        here.live = LivePeer(here.live, inner, step)
    return here.live


def world() -> World:
    """The world of this process, as `init` found it; a world of one before that."""
    return _world if _world is not None else World()


def leave(well: bool) -> None:
    """Close this worker's part. Called when its script or function ends, well or not."""
    if _world is not None and _world.live is not None and _world.is_mine:
        _world.live.leave(well)
    forget()


def forget() -> None:
    """Start without a world: a forked worker is not what its parent was."""
    global _world
    _world = None
    os.environ.pop(JOINED, None)


def log(**values: float) -> None:
    """Record metrics: `paceline.log(loss=..., accuracy=...)`. They make the run's history and its target."""
    for name, value in values.items():
        if not isinstance(value, numbers.Real):
            raise PacelineError(f"paceline.log({name}=...) takes a number, got {type(value).__name__}")
    here = world()
    if here.live is not None and here.is_mine:
        here.live.log({name: float(value) for name, value in values.items()})
    else:
        here.logged.append({name: float(value) for name, value in values.items()})
