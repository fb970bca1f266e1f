"""Who takes part in a live run: how it begins, who joins later, who is refused.

Worker 0's description of the model becomes the run's; everybody else's must have the same digest.
"""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

from paceline import policies
from paceline.errors import ConfigError, PacelineError, RunFailed
from paceline.runtime.live import checkpoint, wire
from paceline.runtime.live.driver.scheduling import Scheduling
from paceline.runtime.live.worker.joining import BEGUN

if TYPE_CHECKING:
    from paceline.runtime.live.driver.launch import Driver

DEFAULT_POLICY = "bsp"


class Admission:
    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.described: dict[tuple[int, int], wire.Describe] = {}
        self.waiting: list[wire.Describe] = []
        """Who came while the servers were changing."""

    def take(self, message: wire.Describe) -> None:
        """A worker has described its model."""
        driver = self.driver
        self.described[message.rank, message.incarnation] = message
        if driver.stopping:
            driver.tell_worker(message.rank, message.incarnation, wire.Stop("the run is ending"))
        elif driver.reslicing.under_way:
            self.waiting.append(message)
        elif driver.begun:
            self._admit_late(message)

    def admit_waiting(self) -> None:
        """Hear those who came while the servers were changing, if they are still there."""
        waiting, self.waiting = self.waiting, []
        there = {(child.rank, child.incarnation) for child in self.driver.live_workers()}
        for message in waiting:
            if (message.rank, message.incarnation) in there:
                self.take(message)

    def consider_beginning(self) -> None:
        """Begin when every worker that is alive has described its model and every server is configured."""
        driver = self.driver
        workers = driver.live_workers()
        missing = [str(c) for c in workers if (c.rank, c.incarnation) not in self.described]
        driver.watchman.tell_missing(missing)
        if not workers or missing or driver.restarting.due or not driver.servers.all_there:
            return
        if driver.hosts is not None and len(workers) < driver.members.workers:
            return
        if driver.lead is None:
            self._configure()
        elif driver.servers.all_configured:
            workers = [child for child in workers if self._fits(self.described[child.rank, child.incarnation])]
            driver.begun = True
            (driver.folder.path / BEGUN).touch()
            if driver.keeper is not None and driver.keeper.keeping.resume and driver.keeper.last is not None:
                shutil.copy(checkpoint.others_of(driver.keeper.last), driver.folder.path / "others")
            driver.announce(driver.authority.admit({child.rank: child.incarnation for child in workers}))
            for child in workers:
                self._welcome(self.described[child.rank, child.incarnation])

    def _configure(self) -> None:
        driver = self.driver
        lead = self.described.get((0, driver.authority.incarnations.get(0, 0)))
        if lead is None or lead.layout is None or lead.optimizer is None:
            raise self.never_began()
        driver.lead = lead
        if driver.keeper is not None:
            driver.keeper.check_layout(lead.layout)
        if driver.policy is None:
            driver.policy = policies.parse(lead.policy or DEFAULT_POLICY)
        if driver.peers.active:
            driver.peers.place()
        driver.policy.validate(driver.members)
        driver.epoch_s = time.monotonic()
        if driver.peers.active:
            driver.peers.prepare()
            return
        if driver.policy.has_scheduler:
            driver.scheduling = Scheduling(driver, driver.policy, driver.folder.path / "trace")
        driver.servers.configure(lead.layout)

    def _admit_late(self, described: wire.Describe) -> None:
        driver = self.driver
        if self._fits(described):
            driver.announce(driver.authority.admit({described.rank: described.incarnation}))
            driver.say(f"worker {described.rank} joined")
            self._welcome(described)

    def _welcome(self, described: wire.Describe) -> None:
        driver = self.driver
        if self._fits(described):
            resumed = driver.keeper is not None and driver.keeper.keeping.resume
            view = driver.authority.view()
            doors = driver.peers.doors(view) if driver.peers.active else driver.servers.doors_now
            begin = wire.Begin(
                view, str(driver.policy), driver.epoch_s, driver.watchman.hyper, driver.servers.assignment, doors,
                driver.reslicing.last, resumed, driver.peers.before, driver.peers.graph,
            )  # fmt: skip
            driver.tell_worker(described.rank, described.incarnation, begin)
            driver.peers.tell_done((described.rank, described.incarnation))

    def _fits(self, described: wire.Describe) -> bool:
        driver = self.driver
        assert driver.lead is not None
        if not driver.peers.has_place(described.rank):
            reason = driver.peers.full
        elif described.digest == driver.lead.digest:
            return True
        else:
            reason = (
                f"the model of worker {described.rank} differs from worker 0's "
                "(names, shapes, groups or dtype of the parameters, kind of optimizer, policy): "
                "build the same on every worker"
            )
        driver.remove(described.rank, described.incarnation)
        driver.tell_worker(described.rank, described.incarnation, wire.Refuse(reason))
        return False

    def never_began(self) -> PacelineError:
        """Why nothing was trained."""
        driver = self.driver
        why = "; ".join([*driver.failures, *driver.losses])
        if driver.refused and driver.refused == len(driver.failures):
            return ConfigError(f"{why}: see above")
        if why:
            return RunFailed(f"{why}, before the run began")
        return RunFailed("the script ended without making a paceline.Optimizer: nothing was trained")
