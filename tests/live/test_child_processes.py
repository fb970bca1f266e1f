"""Processes that a worker has started or forked: they have its rank, but no part in the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
import torch

import paceline
from paceline import session
from paceline.errors import PacelineError
from tests.live.short_scripts import STEPS, training


def in_a_child(deed: Callable[[], object], fresh: bool) -> None:
    """Do it in a fork; if `fresh`, as a new interpreter would, which has nothing but the environment."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if fresh:
                session._world = None
            deed()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def be_an_onlooker() -> None:
    world = paceline.init()
    assert (world.rank, world.size, world.is_mine) == (1, 2, False)
    paceline.log(loss=1.0)
    with pytest.raises(PacelineError, match=r"a process that worker 1 has started made a paceline.Optimizer"):
        paceline.Optimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))


@pytest.mark.parametrize("fresh", [True, False], ids=["started", "forked"])
@pytest.mark.parametrize("policy", ["bsp", "hop:graph=ring"])
def test_it_has_the_rank_and_no_part(policy: str, fresh: bool) -> None:
    run = paceline.launch(training(lambda: in_a_child(be_an_onlooker, fresh)), workers=2, policy=policy, timeout_s=60)
    assert run.failures == []
    assert run.metrics.iterations == STEPS
    assert run.history == [], "what it logs is its own"


def test_a_fork_that_ends_as_scripts_do_ends_alone() -> None:
    def fork_and_exit() -> None:
        if (child := os.fork()) == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0

    run = paceline.launch(training(fork_and_exit), workers=2, policy="bsp", timeout_s=30)
    assert run.failures == []
    assert run.metrics.iterations == STEPS


def test_in_a_world_of_one_forks_are_worlds_of_one_too() -> None:
    assert paceline.init().size == 1

    def train() -> None:
        opt = paceline.Optimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1))
        opt.step()
        assert paceline.init().is_mine

    in_a_child(train, fresh=False)
    session.forget()


def test_a_worker_may_begin_another_run() -> None:
    def begin() -> None:
        inner = paceline.launch(training(lambda: None), workers=2, policy="asp", timeout_s=30)
        assert inner.metrics.iterations == STEPS

    run = paceline.launch(training(begin), workers=2, policy="bsp", timeout_s=60)
    assert run.failures == []
    assert run.metrics.iterations == STEPS
