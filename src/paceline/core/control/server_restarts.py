"""What becomes of a server whose process has ended, and what is lost with it.

    asked to end       it has left its part, or was removed: nothing
    before the run     it is started again as it was, up to `MOST_RESTARTS` times; then something kills each of them
    with a log         it is brought back from that: nothing acknowledged is lost
    new, being given   it starts again from what others have given it
    otherwise          it starts from the last checkpoint that is whole, or from the beginning if there is none, and
                       what it has lost is said now and at the end

One that fails by itself when it is started again would do so for ever: the run ends. So it does when one fails by
itself for the third time from the same state, and if there is nothing to go on from at the end, when no worker is left
that could train it again.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, assert_never

from msgspec import Struct

from paceline.core.control.machine import ControlMachine
from paceline.core.control.worker_restarts import EndRun

MOST_RESTARTS = 10
MOST_FAILURES = 3

Source = Literal["start", "log", "given", "checkpoint", "beginning"]


class ServerEnded(Struct, frozen=True):
    """A server's process has ended, `how` in words. A negative code is the signal that killed it."""

    shard: int
    incarnation: int
    code: int
    how: str
    begun: bool
    """Workers train."""
    finishing: bool
    """The servers are to end."""
    done: bool
    """It has left its part, or was removed."""
    configured: bool
    """It was in this incarnation."""
    logged: bool
    """It has a log of everything it has done."""
    given: bool
    """What others have given it is still there."""


class CheckpointFound(Struct, frozen=True):
    """The answer to `FindCheckpoint`: what is there, in words, or ""."""

    shard: int
    what: str


class FindCheckpoint(Struct, frozen=True):
    """Say at once from which checkpoint this server can start."""

    shard: int


class RestartServer(Struct, frozen=True):
    """Start this server again, and say why. `source` names the state it will find, which the driver looks up when it
    configures the server."""

    shard: int
    source: Source
    why: str


class AbandonLog(Struct, frozen=True):
    """End the run: this server cannot be brought back from its log, and nothing else has all that was acknowledged."""

    shard: int


ServerEvent = ServerEnded | CheckpointFound
ServerOrder = RestartServer | FindCheckpoint | AbandonLog | EndRun


class ServerRestarter(ControlMachine[ServerEvent, ServerOrder]):
    """Has servers started again that have died, as long as that makes sense."""

    def __init__(self) -> None:
        super().__init__()
        self.asking: dict[int, ServerEnded] = {}
        """Of which servers it is not known yet whether they have a checkpoint."""
        self.failures: Counter[tuple[int, str]] = Counter()
        """How often each server has failed by itself, by what it was to be restarted from."""
        self.losses: list[str] = []
        """What servers that were killed have lost, in words."""

    def take(self, event: ServerEvent) -> None:
        match event:
            case ServerEnded():
                if not event.done:
                    self.on_server_ended(event)
            case CheckpointFound():
                self.on_checkpoint_found(self.asking.pop(event.shard), event.what)
            case _:
                assert_never(event)

    def on_server_ended(self, event: ServerEnded) -> None:
        what = f"server {event.shard} {event.how}"
        if not event.begun:
            if event.code > 0 or event.incarnation >= MOST_RESTARTS:
                self.orders.append(EndRun(f"{what} before the run began: it is not started again"))
            else:
                self.restart(event, "start", f"{what} before the run began; starting it again")
        elif event.code > 0 and event.incarnation and not event.configured:
            failed_again = EndRun(f"{what} when it was started again: see above")
            self.orders.append(AbandonLog(event.shard) if event.logged else failed_again)
        elif event.logged:
            self.restart(event, "log", f"{what}; restarting it from its log: nothing acknowledged is lost")
        elif event.given:
            self.restart(event, "given", f"{what}; restarting it from what others gave it")
        else:
            self.asking[event.shard] = event
            self.orders.append(FindCheckpoint(event.shard))

    def on_checkpoint_found(self, event: ServerEnded, found: str) -> None:
        what = f"server {event.shard} {event.how}"
        if not found and event.finishing:
            why = f"{what} and there is no checkpoint to restart it from"
            self.orders.append(EndRun(f"{why}: the run cannot go on without its part of the model"))
            return
        self.failures[event.shard, found] += event.code > 0
        if self.failures[event.shard, found] == MOST_FAILURES:
            self.orders.append(EndRun(f"{what} for the {MOST_FAILURES}rd time from the same state: see above"))
            return
        lost = "there is no checkpoint yet, restarting it from the beginning: ALL its updates are lost"
        if found:
            lost = f"restarting it from {found}: its updates since then are lost"
        self.losses.append(f"WARNING: {what}; {lost}")
        self.restart(event, "checkpoint" if found else "beginning", self.losses[-1])

    def restart(self, event: ServerEnded, source: Source, why: str) -> None:
        self.orders.append(RestartServer(event.shard, source, why))
