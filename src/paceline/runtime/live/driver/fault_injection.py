"""A scenario's faults in a live run: the driver kills, starts, stops and pauses workers when they are due.

Faults that wait for an iteration are carried out by the worker itself, which knows its iteration. Other numbers of
servers are asked for here, or by the worker that is first at the iteration.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import assert_never

from paceline.cluster import Cluster, Fault
from paceline.runtime.live.driver.children import Child
from paceline.runtime.live.driver.messenger import Messenger
from paceline.runtime.live.driver.processes import Workers
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.protocol import resizing_messages, wire


class FaultInjector:
    def __init__(
        self,
        cluster: Cluster | None,
        state: RunState,
        workers: Workers,
        messenger: Messenger,
        want: Callable[[resizing_messages.Want], None],
    ) -> None:
        """`want` takes the wish for another number of servers."""
        self.state = state
        self.workers = workers
        self.messenger = messenger
        self.want = want
        timed = [fault for fault in (cluster.faults if cluster is not None else ()) if fault.at_s is not None]
        self.due = sorted(timed, key=lambda fault: fault.at_s or 0.0)
        resizes = enumerate(cluster.resizes if cluster is not None else ())
        self.resizes = [(entry, resize) for entry, resize in resizes if resize.at_s is not None]
        self.worker_restarts: dict[int, float] = {}
        """Workers struck down that are to come back, and after how long."""
        self.at_iteration = [
            fault
            for fault in (cluster.faults if cluster is not None else ())
            if fault.kind == "restart" and fault.at_iteration is not None
        ]

    def tick(self) -> None:
        now = self.state.now()
        while self.state.begun and self.due and now >= (self.due[0].at_s or 0.0):
            self.strike(self.due.pop(0))
        for entry, resize in self.resizes if self.state.begun else ():
            if now >= (resize.at_s or 0.0):
                self.want(resizing_messages.Want(resize.count, entry=entry))

    def strike(self, fault: Fault) -> None:
        children = [child for child in self.workers.live() if child.rank == fault.worker]
        match fault.kind:
            case "join":
                if not children and self.workers.live() and not self.state.stopping:
                    self.workers.start(fault.worker)
            case "crash":
                for child in children:
                    child.kill()
            case "restart":
                for child in children:
                    self.worker_restarts[child.rank] = fault.for_s
                    child.kill()
            case "leave":
                for child in children:
                    stop = wire.Stop("the scenario says so", leaves=True)
                    self.messenger.to_worker(child.rank, child.incarnation, stop)
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
        if child.rank in self.worker_restarts:
            return self.worker_restarts.pop(child.rank)
        for fault in self.at_iteration:
            if fault.worker == child.rank and child.incarnation == 0:
                self.at_iteration.remove(fault)
                return fault.for_s
        return None
