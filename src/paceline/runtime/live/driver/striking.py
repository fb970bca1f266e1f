"""A scenario's faults in a live run: the driver kills, starts, stops and pauses workers when they are due.

Faults that wait for an iteration are carried out by the worker itself, which knows its iteration. Other numbers of
servers are asked for here, or by the worker that is first at the iteration.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, assert_never

from paceline.cluster import Cluster, Fault
from paceline.runtime.live import wire
from paceline.runtime.live.driver.children import Child

if TYPE_CHECKING:
    from paceline.runtime.live.driver.launch import Driver


class Striker:
    def __init__(self, driver: Driver, cluster: Cluster | None) -> None:
        self.driver = driver
        timed = [fault for fault in (cluster.faults if cluster is not None else ()) if fault.at_s is not None]
        self.due = sorted(timed, key=lambda fault: fault.at_s or 0.0)
        resizes = enumerate(cluster.resizes if cluster is not None else ())
        self.resizes = [(entry, resize) for entry, resize in resizes if resize.at_s is not None]
        self.restarting: dict[int, float] = {}
        """Workers struck down that are to come back, and after how long."""
        self.at_iteration = [
            fault
            for fault in (cluster.faults if cluster is not None else ())
            if fault.kind == "restart" and fault.at_iteration is not None
        ]

    def tick(self) -> None:
        driver = self.driver
        while driver.begun and self.due and time.monotonic() - driver.epoch_s >= (self.due[0].at_s or 0.0):
            self.strike(self.due.pop(0))
        for entry, resize in self.resizes if driver.begun else ():
            if time.monotonic() - driver.epoch_s >= (resize.at_s or 0.0):
                driver.reslicing.want(wire.Want(resize.count, entry=entry))

    def strike(self, fault: Fault) -> None:
        driver = self.driver
        children = [child for child in driver.live_workers() if child.rank == fault.worker]
        match fault.kind:
            case "join":
                if not children and driver.live_workers() and not driver.stopping:
                    driver.start_worker(fault.worker)
            case "crash":
                for child in children:
                    child.kill()
            case "restart":
                for child in children:
                    self.restarting[child.rank] = fault.for_s
                    child.kill()
            case "leave":
                for child in children:
                    driver.tell_worker(child.rank, child.incarnation, wire.Stop("the scenario says so"))
            case "pause":
                for child in children:
                    child.signal(signal.SIGSTOP)
                    resume = threading.Timer(fault.for_s, child.signal, [signal.SIGCONT])
                    resume.daemon = True
                    resume.start()
            case _:
                assert_never(fault.kind)

    def restart_pause(self, child: Child, code: int) -> float | None:
        """How long a worker that was killed stays away, if the scenario says that it comes back."""
        if code != -signal.SIGKILL:
            return None
        if child.rank in self.restarting:
            return self.restarting.pop(child.rank)
        for fault in self.at_iteration:
            if fault.worker == child.rank and child.incarnation == 0:
                self.at_iteration.remove(fault)
                return fault.for_s
        return None
