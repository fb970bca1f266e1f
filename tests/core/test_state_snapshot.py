"""A machine that was frozen and thawed, after every single event, behaves as one that was not."""

from __future__ import annotations

import random

import msgspec
import pytest

from paceline.core.actions import Action
from paceline.core.events import Event, ViewChanged
from paceline.core.machine import Machine
from paceline.core.messages import Members, Role, View
from paceline.core.policy import CentralPolicy
from paceline.core.shard import Shard
from paceline.core.state_snapshot import CannotSnapshot, restore_snapshot, take_snapshot
from paceline.policies import SSP, parse
from paceline.testing import MachineFactory, play

POLICIES = [
    "bsp", "asp:staleness_weighted=true", "ssp:staleness=2,lazy=true", "backup:extra=1", "dssp:low=1,high=4",
    "pssp:staleness=1,significance=true,lazy=true", "deadline:quantile=0.1,factor=1,least=0.3",
    "asp@0,ssp:staleness=1@3,backup:extra=1@6,asp@8", "deadline+asp+pssp:staleness=1",
    "scheduled:base=ssp(staleness=2)", "elastic:lookahead=3", "specsync:base=asp,abort_time=1,abort_rate=0.5",
]  # fmt: skip


def thawing(policy: CentralPolicy) -> MachineFactory:
    """Shards that are written down and made anew after each event, as if their servers were killed each time."""

    def make(role: Role, rank: int, members: Members, seed: int) -> Machine:
        machine = policy.machine(role, rank, members, seed)
        if not isinstance(machine, Shard):
            return machine
        plain = type(machine)

        class Thawed(plain):
            def handle(self, event: Event) -> list[Action]:
                actions = super().handle(event)
                written = msgspec.msgpack.encode(take_snapshot(self))
                fresh = policy.machine(role, rank, members, seed)
                restore_snapshot(fresh, msgspec.msgpack.decode(written))
                assert msgspec.msgpack.encode(take_snapshot(fresh)) == written
                vars(self).update(vars(fresh), checks=True)
                return actions

        machine.__class__ = Thawed
        return machine

    return make


@pytest.mark.parametrize("text", POLICIES)
def test_a_thawed_machine_goes_on_as_the_frozen_one_would_have(text: str) -> None:
    policy = parse(text)
    for seed in range(4):
        given = {"workers": 4, "iterations": 10, "seed": seed, "patience": 10 * text.startswith("elastic")}
        plain = play(policy, **given)
        assert plain.trace.to_bytes() == play(policy, machine_factory=thawing(policy), **given).trace.to_bytes()


def test_what_cannot_be_written_down_is_refused_by_name() -> None:
    shard = Shard(SSP(staleness=1), 0, Members(1, 1))
    shard.handle(ViewChanged(0.0, View(1, ((0, 0),))))
    shard.gate.dice = random.Random(0)
    with pytest.raises(CannotSnapshot, match=r"Shard\.gate\.dice is a Random"):
        take_snapshot(shard)
