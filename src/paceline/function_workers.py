"""Workers that call a function, each in a fork of this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from paceline import session
from paceline.runtime.live.driver.children import Child, WorkerStarter, environment_of, fork
from paceline.runtime.live.system.process_setup import run_worker


def function_starter(work: Callable[[], object]) -> WorkerStarter:
    """Starts workers that call a function, each in a fork of this process: closures and notebooks work, without
    pickle."""
    # The first optimizer of a process has torch import half of itself, for seconds. Once here, not in every fork.
    torch.optim.SGD([torch.zeros(1)], lr=0.0)

    def start(rank: int, incarnation: int, folder: Path) -> Child:
        def run() -> int:
            os.environ.update(environment_of(rank, incarnation, folder))
            session.forget()
            return run_worker(rank, work, session.leave)

        return fork("worker", rank, incarnation, run)

    return WorkerStarter(start)
