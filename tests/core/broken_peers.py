"""Peers that break one rule each, on purpose: what the judge of `paceline.testing.peers` must catch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from paceline.core.actions import Drop
from paceline.core.adpsgd_peer import NOBODY, ADPSGDPeer
from paceline.core.events import GradientRejected, HelloArrived, OfferArrived, ViewChanged
from paceline.core.hop_peer import HopPeer, Phase
from paceline.core.messages import Ack, Handle, Token, Update
from paceline.core.topology import Topology, topology
from paceline.core.update_queue import HopRules, UpdateQueue, WeightedAverage
from paceline.policies import Hop


@dataclass(frozen=True)
class OnGraph(Hop):
    """Hop on a graph that no name stands for."""

    drawn: Topology = dataclasses.field(default=Topology(1, ()), kw_only=True)

    def topology(self, peers: int) -> Topology:
        return self.drawn


LONG_WAY_BACK = topology(
    8,
    [(0, 1), (0, 2), (0, 3)]
    + [(a, b) for a in (1, 2, 3) for b in (1, 2, 3)]
    + [(1, 4), (2, 4), (2, 5), (3, 5), (4, 6), (5, 6), (4, 7), (5, 7), (6, 0), (7, 0)],
)
"""0 sends to three who need it not, and hears from them by three steps: they can be 3 max_gap ahead of it."""


class Unchecked(HopPeer):
    def check(self) -> None:
        """Look away."""


class AveragesWithOneLess(Unchecked):
    """Goes on when one update is still missing."""

    def __init__(self, rank: int, graph: Topology, rules: HopRules) -> None:
        super().__init__(rank, graph, rules)
        enough = self.queue.missing
        self.queue.missing = lambda k, firsts: enough(k, firsts)[1:]  # type: ignore[method-assign]


class TakesOlder(Unchecked):
    """An update may be one iteration older than allowed."""

    def __init__(self, rank: int, graph: Topology, rules: HopRules) -> None:
        super().__init__(rank, graph, rules)
        self.queue = UpdateQueue(HopRules(staleness=(rules.staleness or 0) + 1))


class IgnoresTokens(Unchecked):
    """Enters an iteration without a token."""

    def lacking(self) -> list[int]:
        return []


class SendsNoTokenWhenItJumps(Unchecked):
    def enter(self, iteration: int, joining: bool = False) -> None:
        jumped = iteration > self.iteration + 1
        before = len(self.actions)
        super().enter(iteration, joining)
        if jumped:
            kept = [a for a in self.actions[before:] if not isinstance(getattr(a, "message", None), Token)]
            self.actions[before:] = kept


class JumpsAnyDistance(Unchecked):
    """Without the cap of max_gap + 1."""

    def jump(self) -> int:
        rules = self.rules
        behind = min(self.tokens(peer) for peer in self.links.outs) - (rules.max_gap or 0)
        return min(rules.skip or 1, behind) if behind >= rules.trigger else 1


class JumpsPastItsNeighbours(Unchecked):
    """As far as its tokens reach: beyond the slowest out-neighbour, who may still need what is skipped."""

    def jump(self) -> int:
        least = min(self.tokens(peer) for peer in self.links.outs)
        return min(self.rules.skip or 1, least, (self.rules.max_gap or 0) + 1)


class AcksLate(Unchecked):
    """Acknowledges only when it leaves the iteration: two neighbours then wait for each other's ack."""

    def average(self, k: int, then: Phase) -> bool:
        before = len(self.actions)
        done = super().average(k, then)
        self.actions[before:] = [a for a in self.actions[before:] if not isinstance(getattr(a, "message", None), Ack)]
        return done

    def enter(self, iteration: int, joining: bool = False) -> None:
        if iteration > 1:
            self.broadcast(self.links.ins, Ack(self.rank, self.links.incarnation, iteration - 2))
        super().enter(iteration, joining)


class Hoarding(UpdateQueue):
    def is_late(self, handle: Handle, averaged: int) -> bool:
        return False

    def pop_average(self, k: int, weights: Mapping[int, float], own: float) -> WeightedAverage:
        average = super().pop_average(k, weights, own)
        for handle in average.late:
            self.held[handle.source][handle.iteration] = handle
        return WeightedAverage(average.handles, average.weights, average.own, ())


class KeepsWhatIsLate(Unchecked):
    """Never discards: the queue grows."""

    def __init__(self, rank: int, graph: Topology, rules: HopRules) -> None:
        super().__init__(rank, graph, rules)
        self.queue = Hoarding(rules)


class WeighsItselfAlone(Unchecked):
    """Does not say what its parameters weigh."""

    def parameters(self) -> Update:
        return Update(replace(super().parameters().handle, weight=1.0))


class ForgetsInSilence(Unchecked):
    """Does not say that an update is not needed any more: whoever keeps its tensor keeps it for ever."""

    def drop(self, handle: Handle, reason: str) -> None:
        """Say nothing."""


class DropsAndAverages(Unchecked):
    """Forgets an update that it has averaged in."""

    def average(self, k: int, then: Phase) -> bool:
        done = super().average(k, then)
        used: tuple[Handle, ...] = next((a.handles for a in self.actions if hasattr(a, "own")), ())
        if done and used:
            self.actions.append(Drop(used[0], "done with it"))
        return done


class WeighsAllAlike(Unchecked):
    """The plain mean, whatever the weights of the graph."""

    def __init__(self, rank: int, graph: Topology, rules: HopRules) -> None:
        super().__init__(rank, graph, rules)
        self.queue.shares = lambda taken, k, weights: [1.0] * (len(taken) + 1)  # type: ignore[method-assign]


class GreetsNobody(Unchecked):
    """Says nothing on new links."""

    def send_hello(self, peer: int, first: int | None = None) -> None:
        self.links.greeted[peer] = self.links.view.number


class KeepsNothingEarly(Unchecked):
    """Forgets a hello of a view that is still to come."""

    def on_hello_arrived(self, event: HelloArrived) -> None:
        if event.hello.view <= self.links.view.number:
            super().on_hello_arrived(event)


class ExpectsAllFromTheStart(Unchecked):
    """Waits for updates that an in-neighbour sent before there was an edge."""

    def on_view_changed(self, event: ViewChanged) -> None:
        super().on_view_changed(event)
        self.links.firsts = dict.fromkeys(self.links.ins, 0)

    def on_hello_arrived(self, event: HelloArrived) -> None:
        super().on_hello_arrived(event)
        self.links.firsts = dict.fromkeys(self.links.ins, 0)


class AppliesWhatIsRejected(HopPeer):
    """Steps on a gradient that is not finite."""

    def on_gradient_rejected(self, event: GradientRejected) -> None:
        self.finish_computing(event, "")


class GossipsWhatIsRejected(ADPSGDPeer):
    """The same."""

    def on_gradient_rejected(self, event: GradientRejected) -> None:
        self.finish_computing(event, "")


class WaitsWhenBusy(ADPSGDPeer):
    """Makes others wait while an offer is out: offers in a circle wait for ever."""

    def __init__(self, rank: int, graph: Topology, seed: int) -> None:
        super().__init__(rank, graph, seed)
        self.kept: list[OfferArrived] = []

    def on_offer_arrived(self, event: OfferArrived) -> None:
        if self.begun and self.offered not in (NOBODY, event.offer.handle.source):
            self.kept.append(event)
        else:
            super().on_offer_arrived(event)

    def settle(self) -> None:
        super().settle()
        while self.kept and self.offered == NOBODY:
            super().on_offer_arrived(self.kept.pop(0))


class IgnoresTheLost(ADPSGDPeer):
    """Waits for the answer of a neighbour that is gone."""

    def on_view_changed(self, event: ViewChanged) -> None:
        offered = self.offered
        super().on_view_changed(event)
        if offered != NOBODY and self.offered == NOBODY:
            self.offered = offered

    def check(self) -> None:
        """Look away."""


CASES: list[tuple[type, str | OnGraph, set[str]]] = [
    (AveragesWithOneLess, "hop:graph=ring-based", {"average"}),
    (TakesOlder, "hop:graph=ring,staleness=2", {"average"}),
    (IgnoresTokens, "hop:graph=ring-based,backup=1,max_gap=2", {"bound"}),
    (SendsNoTokenWhenItJumps, "hop:graph=ring-based,backup=1,max_gap=3,skip=10,trigger=1", {"tokens"}),
    (JumpsAnyDistance, OnGraph(backup=1, max_gap=2, skip=10, trigger=1, drawn=LONG_WAY_BACK), {"hang"}),
    (JumpsPastItsNeighbours, "hop:graph=ring-based,backup=1,max_gap=3,skip=10,trigger=1", {"hang"}),
    (AcksLate, "hop:graph=ring,notify_ack=true", {"hang"}),
    (KeepsWhatIsLate, "hop:graph=ring-based,backup=1,max_gap=2", {"capacity"}),
    (ForgetsInSilence, "hop:graph=ring-based,backup=1,max_gap=2", {"handles"}),
    (DropsAndAverages, "hop:graph=ring", {"handles"}),
    (WeighsAllAlike, "hop:graph=hierarchical,machines=3:2:2", {"average"}),
    (GreetsNobody, "hop:graph=ring", {"hang"}),
    (KeepsNothingEarly, "hop:graph=ring", {"hang"}),
    (ExpectsAllFromTheStart, "hop:graph=ring", {"hang"}),
    (AppliesWhatIsRejected, "hop:graph=ring,order=serial", {"order"}),
    (GossipsWhatIsRejected, "adpsgd:graph=ring", {"order"}),
    (WaitsWhenBusy, "adpsgd:graph=complete", {"hang"}),
    (IgnoresTheLost, "adpsgd:graph=ring-based", {"hang"}),
]
