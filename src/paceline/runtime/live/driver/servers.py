"""The driver's care of the servers: they are started, configured, told the views, and restarted when they die."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paceline.errors import RunFailed
from paceline.runtime.live import wire
from paceline.runtime.live.configuration import Door
from paceline.runtime.live.driver.children import Child, how, start_server
from paceline.tensors.assignment import Assignment, initial
from paceline.tensors.layout import Layout

if TYPE_CHECKING:
    from paceline.runtime.live.driver.launch import Driver

LAST_WORDS_S = 0.2


class Servers:
    def __init__(self, driver: Driver, count: int) -> None:
        self.driver = driver
        self.count = count
        self.there: set[int] = set()
        self.configured: set[int] = set()
        self.finished: set[int] = set()
        self.lives = [0] * count
        """How often each was started anew, those that were removed included."""
        self.doors: dict[int, Door] = {}
        """Where each is spoken to, as it said."""
        self.retired: set[tuple[int, int]] = set()
        """(shard, life) of those that were removed."""
        self.homeless: set[int] = set()
        """To be started when a host has a place for them."""
        self.assignment: Assignment = ()
        """Which has which part of the parameters."""

    @property
    def all_there(self) -> bool:
        """The processes have started."""
        return len(self.there) == self.count

    @property
    def all_configured(self) -> bool:
        """False while one is being restarted: what it is told now would be lost."""
        return len(self.configured) == self.count

    @property
    def all_finished(self) -> bool:
        return len(self.finished) == self.count

    @property
    def doors_now(self) -> tuple[Door, ...]:
        """Where each is, in its present life."""
        return tuple(self.doors[shard] for shard in range(self.count))

    def start(self) -> None:
        """Start all, or, if they are to run on other hosts that are not there yet, note that they are to be."""
        for shard in range(self.count):
            self._start(shard)

    def _start(self, shard: int) -> None:
        hosts = self.driver.hosts
        if hosts is None or not hosts.meeting.spread:
            self.driver.adopt(start_server(self.driver.folder.path, shard, self.lives[shard]))
        elif (host := hosts.place_server(shard)) is not None:
            self.driver.adopt(hosts.start(host, "server", shard, self.lives[shard]))
        else:
            self.homeless.add(shard)

    def tick(self) -> None:
        """Start those that found no place, if there is one now."""
        for shard in sorted(self.homeless):
            self.homeless.discard(shard)
            self._start(shard)

    def configure(self, layout: Layout) -> None:
        """Tell all what they are to hold, at the beginning."""
        self.assignment = initial(layout, self.count)
        self.driver.lasting.begin()
        for shard in range(self.count):
            self._configure(shard)

    def _configure(self, shard: int) -> None:
        driver = self.driver
        lead = driver.lead
        assert lead is not None
        assert lead.layout is not None
        assert lead.optimizer is not None
        optimizer, hyper = lead.optimizer, driver.watchman.hyper
        if hyper is not None:  # a server that is restarted goes on with what schedulers have changed
            optimizer = msgspec.structs.replace(optimizer, groups=hyper)
        checkpoint = driver.keeper.last if driver.keeper is not None else None
        every = driver.plan.keeping.every_updates if driver.plan.keeping is not None else None
        configure = wire.Configure(
            str(driver.policy), lead.layout, self.assignment, optimizer, driver.epoch_s,
            str(checkpoint) if checkpoint is not None else None, driver.reslicing.reslice_for(shard), every,
            driver.lasting.order_for(shard),
        )  # fmt: skip
        self.tell(shard, configure)

    def ready(self, ready: wire.Ready) -> None:
        driver = self.driver
        self.doors[ready.shard] = ready.door
        if not ready.configured:
            self.there.add(ready.shard)
            driver.enrolling.tell(ready.shard)
            if driver.begun:
                self._configure(ready.shard)
            return
        self.configured.add(ready.shard)
        if driver.begun:
            view = driver.authority.view()
            self.tell(ready.shard, wire.NewView(view))
            if driver.reslicing.phase == "taking":
                return  # the workers are told of all servers together
            for rank, incarnation in view.members:
                driver.tell_worker(rank, incarnation, wire.Reopened(ready.shard, ready.door))
            if driver.asked_to_finish:  # it was asked to, and died
                self.tell(ready.shard, wire.Finish())

    def ended(self, child: Child, code: int) -> None:
        """A server's process is gone: it was asked to, or it is restarted, from its log or the last checkpoint."""
        driver = self.driver
        if code == 0 and driver.asked_to_finish:
            self._hear_last_words(child)
        if child.rank in self.finished or (child.rank, child.incarnation) in self.retired:
            return
        driver.reslicing.server_died(str(child))
        checkpoint = driver.keeper.last if driver.keeper is not None else None
        given = driver.reslicing.reslice_for(child.rank) is not None
        if driver.lasting.restores(child, code):
            self._restart(child, f"{child} {how(code)}", "its log: nothing acknowledged is lost")
            return
        if driver.asked_to_finish or not driver.begun or (checkpoint is None and not given):
            raise RunFailed(
                f"{child} {how(code)} and there is no checkpoint to restart it from: "
                "the run cannot go on without its part of the model"
            )
        source = "what others gave it" if given else f"{checkpoint}: its updates since then are lost"
        self._restart(child, f"{child} {how(code)}", source)

    def _restart(self, child: Child, what: str, source: str) -> None:
        driver = self.driver
        driver.say(f"{what}; restarting it from {source}")
        if driver.keeper is not None and driver.keeper.under_way is not None:
            driver.keeper.give_up(what)
        self.there.discard(child.rank)
        self.configured.discard(child.rank)
        self.lives[child.rank] += 1
        self._start(child.rank)

    def change(self, after: Assignment, order: wire.Reslice) -> None:
        """From now on there are so many: the last ones end or are started, the others get other parts."""
        before, self.count, self.assignment = self.count, len(after), after
        for shard in range(self.count, before):
            self.retired.add((shard, self.lives[shard]))
            self.tell(shard, wire.Retire())
            self.there.discard(shard)
            self.configured.discard(shard)
            self.lives[shard] += 1
        for shard in range(min(before, self.count)):
            self.configured.discard(shard)
            self.tell(shard, order)
        self.lives += [0] * (self.count - len(self.lives))
        for shard in range(before, self.count):
            self._start(shard)

    def _hear_last_words(self, server: Child) -> None:
        """It ended as asked; that it said so may be noticed after that it is gone."""
        until = time.monotonic() + LAST_WORDS_S
        while server.rank not in self.finished and time.monotonic() < until:
            self.driver.waiter.wait(LAST_WORDS_S / 20)
            self.driver.hear_all()

    def order_checkpoint(self, folder: Path) -> dict[int, int]:
        """Have all write their parts; the samplers' epochs at this moment."""
        self.tell_all(wire.Checkpoint(str(folder)))
        return self.driver.decks.unfinished()

    def tell_all(self, message: wire.ToServer) -> None:
        for shard in range(self.count):
            self.tell(shard, message)

    def tell(self, shard: int, message: wire.ToServer) -> None:
        driver = self.driver
        if driver.hosts is not None and (host := driver.hosts.of("server", shard)) is not None:
            driver.hosts.tell_server(host, shard, message)
        else:
            driver.listener.send(b"server:%d" % shard, wire.encode(message))
