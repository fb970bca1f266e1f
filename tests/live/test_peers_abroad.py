"""Peers on different hosts: the same runs, over TCP. Here all are on one, and are made to believe that they are not."""

from __future__ import annotations

import torch

from paceline.core.messages import Members
from paceline.runtime.live import doors
from tests.live.test_abroad import digits, live
from tests.reference import largest_difference, train_alone


def apart(*groups: set[int]):
    """Peers of the same group are on one host."""


def test_complete_standard_serial_over_tcp_equals_single_process(monkeypatch) -> None:
    monkeypatch.setattr(doors, "near_folder", lambda folder, door: None)
    run = live(digits(50), "hop:graph=complete,order=serial", members=Members(3, 0))
    assert run.failures == []
    alone = train_alone("digits-mlp", 3, 50, "sgd:lr=0.1", torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5
