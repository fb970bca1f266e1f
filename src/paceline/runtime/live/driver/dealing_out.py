"""The driver's side of dealing samples: one deck for each sampler of the script (`core/deck.py`).

Workers say which sampler they mean by its number, the order in which the script made them. The first who speaks of
one sets its size and seed; whoever has others for it is refused, since the two would mean different samples by the
same position.

The driver numbers the views, so it is the one who can tell a deck, and at once, whose hands are to be dealt again.
Nobody waits for a deck: a request is answered in the turn in which it is heard.

A resumed run starts the oldest epoch that was not finished when its checkpoint was ordered over again. What was
acknowledged by then had counted before the servers wrote, so nothing is lost; some of that epoch comes twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, assert_never

import msgspec

from paceline.core.deck import CloseEpoch, Deal, Deck, DeckAction, HandRequested, Pass
from paceline.core.events import ViewChanged
from paceline.core.messages import View
from paceline.runtime.live import wire
from paceline.runtime.live.worker.hands import CURRENT

if TYPE_CHECKING:
    from paceline.runtime.live.driver.launch import Driver


class Table:
    """A deck, with what its sampler is on every worker."""

    def __init__(self, size: int, seed: int, first: int) -> None:
        self.size = size
        self.seed = seed
        self.first = first
        self.deck = Deck(size, first=first)
        self.asked: dict[tuple[int, int], int] = {}
        """The epoch each (worker, incarnation) asked for last."""

    def current(self) -> int:
        """The newest epoch that somebody is in."""
        return max(self.deck.unopened - 1, self.first)

    def finished(self) -> list[int]:
        """The epochs of which every sample was part of a gradient that counted."""
        return [epoch for epoch in range(self.first, self.deck.unopened) if epoch not in self.deck.epochs]


class Decks:
    """All decks of a run, by the number of their sampler."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.tables: dict[int, Table] = {}
        self.view = View(0, ())
        """The newest, without peers that are done."""

    def now(self) -> float:
        return time.monotonic() - self.driver.epoch_s

    def announce(self, view: View) -> None:
        self.view = view
        for sampler, table in self.tables.items():
            self.carry_out(sampler, table.deck.handle(ViewChanged(self.now(), view)))

    def hear(self, play: wire.Play) -> None:
        table = self.tables.get(play.sampler) or self.open(play)
        if (play.size, play.seed) != (table.size, table.seed):
            reason = (
                f"paceline.Sampler {play.sampler} of worker {play.rank} has {play.size} samples and seed {play.seed}, "
                f"another worker's has {table.size} and {table.seed}: make the same samplers in the same order on "
                "every worker"
            )
            self.driver.tell_worker(play.rank, play.incarnation, wire.Refuse(reason))
            return
        for event in play.events:
            if isinstance(event, HandRequested):
                epoch = table.current() if event.epoch == CURRENT else event.epoch
                event = msgspec.structs.replace(event, epoch=epoch)
                table.asked[event.worker, event.incarnation] = epoch
            self.carry_out(play.sampler, table.deck.handle(event))

    def open(self, play: wire.Play) -> Table:
        table = self.tables[play.sampler] = Table(play.size, play.seed, self.resumed().get(play.sampler, 0))
        table.deck.handle(ViewChanged(self.now(), self.view))
        return table

    def carry_out(self, sampler: int, actions: Iterable[DeckAction]) -> None:
        for action in actions:
            match action:
                case Deal() | Pass():
                    epoch = self.tables[sampler].asked[action.worker, action.incarnation]
                    self.driver.tell_worker(action.worker, action.incarnation, wire.Dealt(sampler, epoch, action))
                case CloseEpoch():
                    pass  # the deck has forgotten it, and nobody else kept anything of it
                case _:
                    assert_never(action)

    def unfinished(self) -> dict[int, int]:
        """Of each sampler: the oldest epoch that is not finished."""
        oldest = {number: min(table.deck.epochs, default=table.deck.unopened) for number, table in self.tables.items()}
        return {**self.resumed(), **oldest}

    def resumed(self) -> dict[int, int]:
        """The same when this run began."""
        return self.driver.keeper.resumed_epochs if self.driver.keeper is not None else {}
