"""Workers and servers on different hosts: the same runs, over TCP. Here both are on one, and the workers are made to
believe that they are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from paceline import policies, session, workloads
from paceline.cluster import load
from paceline.core.messages import Members
from paceline.run import Run
from paceline.runtime.live import doors
from paceline.runtime.live.children import function_starter
from paceline.runtime.live.launch import Driver, LivePlan
from paceline.runtime.live.watching import Care
from paceline.runtime.live.wire import Abroad
from paceline.tensors import optimizers
from paceline.training import train
from tests.reference import largest_difference, train_alone

LOCAL = Abroad("127.0.0.1", "", (0, 0))
ALL = frozenset(range(16))


def far(work: Callable[[], object], ranks: frozenset[int] = ALL) -> Callable[[], None]:
    """The same work, by workers of which these cannot reach a server through shared memory."""

    def run() -> None:
        if session.init().rank in ranks:
            doors.knock = lambda *where: None
        work()

    return run


def digits(iterations: int, optimizer: str = "sgd:lr=0.1") -> Callable[[], None]:
    return partial(train, workloads.load("digits-mlp"), optimizers.parse(optimizer), 32, iterations, 0)


def driver_of(work: Callable[[], object], policy: str = "bsp", abroad: Abroad = LOCAL, **more) -> Driver:
    given = {"cluster": load("steady:compute_s=0"), "care": Care(timeout_s=60), **more}
    members = given.pop("members", Members(3, 2))
    say = given.pop("say", lambda line: None)
    return Driver(LivePlan(members, function_starter(work), policies.parse(policy), abroad=abroad, **given), say=say)


def live(work: Callable[[], object], policy: str = "bsp", abroad: Abroad = LOCAL, **more) -> Run:
    return driver_of(work, policy, abroad, **more).run()


@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1", "sgd:lr=0.05,momentum=0.9", "adam:lr=0.002"])
def test_bsp_over_tcp_with_keys_equals_single_process(optimizer: str) -> None:
    run = live(far(digits(50, optimizer)))
    assert run.failures == []
    alone = train_alone("digits-mlp", 3, 50, optimizer, torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5
