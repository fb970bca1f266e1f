"""The driver of a live run: starts the processes, numbers the views, and notices everything.

It is the one authority on membership. A worker that ends, in whatever way, makes its sentinel readable at
once; the next view goes to the shards within a millisecond, and whoever waited for it is released by them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import msgspec

from paceline import rundir
from paceline.cluster import to_table
from paceline.core.messages import View
from paceline.core.policy import Policy
from paceline.errors import RunFailed
from paceline.run import Point, Run, ServerChange
from paceline.runtime.driver import Authority
from paceline.runtime.live import memory, wire
from paceline.runtime.live.across import doors
from paceline.runtime.live.configuration import LiveConfig
from paceline.runtime.live.driver.admission import Admission
from paceline.runtime.live.driver.children import Child, how
from paceline.runtime.live.driver.dealing_out import Decks
from paceline.runtime.live.driver.echo import Echo
from paceline.runtime.live.driver.enrolling import Enrolling
from paceline.runtime.live.driver.harvest import harvest, keep_buffers
from paceline.runtime.live.driver.hosts import FarChild, Hosts
from paceline.runtime.live.driver.interrupts import Interrupts
from paceline.runtime.live.driver.keeping import Keeper
from paceline.runtime.live.driver.lasting import Lasting
from paceline.runtime.live.driver.peers import Peers
from paceline.runtime.live.driver.plan import LivePlan
from paceline.runtime.live.driver.reslicing import Reslicing
from paceline.runtime.live.driver.restarting import Restarting
from paceline.runtime.live.driver.scheduling import Scheduling
from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.driver.striking import Striker
from paceline.runtime.live.driver.watching import Watchman
from paceline.runtime.live.peer import slots
from paceline.runtime.live.recording import tracing
from paceline.runtime.live.sockets import Listener, Waiter

__all__ = ["Driver", "LivePlan"]

TICK_S = 0.2


class Driver:
    """One live run. `say` gets a line of text for a person now and then, `watch` each point of the history."""

    def __init__(
        self, plan: LivePlan, say: Callable[[str], None] = print, watch: Callable[[Point], None] | None = None
    ) -> None:
        self.plan = plan
        self.say = say
        self.watch = watch
        self.members = plan.members
        self.authority = Authority()
        self.children: dict[int, Child] = {}
        """By sentinel."""
        self.admission = Admission(self)
        self.servers = Servers(self, plan.members.servers)
        self.enrolling = Enrolling(self.servers, plan.abroad is not None and plan.abroad.keys)
        self.reslicing = Reslicing(self)
        self.lasting = Lasting(self)
        self.changes: list[ServerChange] = []
        self.peers = Peers(self)
        self.hosts: Hosts | None = None
        """The other hosts of the run, if it has some."""
        self.begun = False
        self.asked_to_finish = False
        self.lead: wire.Describe | None = None
        self.policy: Policy | None = plan.policy
        self.history: list[Point] = []
        self.reached_s: float | None = None
        self.failures: list[str] = []
        """Workers that ended with an error, and `losses` those that were killed, in words."""
        self.losses: list[str] = []
        self.ended_well = 0
        self.refused = 0
        self.watchman = Watchman(self, plan.care)
        self.decks = Decks(self)
        self.striker = Striker(self, plan.cluster)
        self.restarting = Restarting(self, plan.care.restarts)
        self.keeper: Keeper | None = None
        self.scheduling: Scheduling | None = None
        """The scheduler, if the policy has one."""
        self.interrupts = Interrupts()
        self.stopping = False
        self.epoch_s = time.monotonic()

    def run(self) -> Run:
        self.folder = memory.RunFolder()
        self.interrupts.catch()
        try:
            if self.plan.keeping is not None:
                self.keeper = Keeper(self.plan.keeping, self.servers.order_checkpoint, self.say)
                try:
                    rundir.write_live(self.plan.keeping.folder, self.folder.path)
                except OSError as error:
                    self.say(f"WARNING: paceline servers will not find this run: {error}; training goes on")
            keeping = self.plan.keeping
            with tracing(self.folder.path, keeping.folder if keeping is not None else None) as output:
                return self._run(output)
        finally:
            self.interrupts.ignore()
            self._end_all()
            self.folder.remove()
            if self.plan.keeping is not None:
                (self.plan.keeping.folder / rundir.LIVE).unlink(missing_ok=True)
            self.interrupts.restore()

    def _run(self, output: Path) -> Run:
        plan = self.plan
        config = LiveConfig(
            self.members,
            plan.seed,
            to_table(plan.cluster) if plan.cluster is not None else None,
            str(output),
            plan.slicing,
            str(plan.policy) if plan.policy is not None else None,
            self.keeper is not None,
            secrets.token_hex(8),
            plan.abroad,
        )
        (self.folder.path / "config").write_bytes(msgspec.json.encode(config))
        if plan.abroad is not None:
            doors.make_nonce(self.folder.path)
        self.listener = Listener(self.folder.path / "driver")
        self.waiter = Waiter()
        try:
            self.waiter.watch(self.listener)
            self.echo = Echo(self.waiter, self.say)
            if plan.meeting is not None:
                self.hosts = Hosts(self, plan.meeting)
                self.waiter.watch(self.hosts.listener)
                plan.opened(self.hosts)
            self.servers.start()
            for rank in range(self.members.workers if self.hosts is None else 0):
                self.start_worker(rank)
            while not self.done():
                self.turn()
            if self.hosts is not None:
                self.hosts.await_ended()
            for sentinel in list(self.children):
                self.child_ended(self.children.pop(sentinel))
            if self.scheduling is not None:
                self.scheduling.close()
            self.lasting.tell_cost()
            return harvest(self, output)
        finally:
            if self.scheduling is not None:
                self.scheduling.close()
            if self.hosts is not None:
                self.hosts.close()
            self.echo.close_all()
            self.listener.close()
            self.waiter.close()

    def done(self) -> bool:
        return self.asked_to_finish and self.servers.all_finished

    def turn(self) -> None:
        """Wait for something to happen, and deal with it."""
        ready = self.waiter.wait(TICK_S if self.scheduling is None else self.scheduling.until_timer(TICK_S))
        self.hear_all()
        if self.hosts is not None:
            self.hosts.hear()
            self.hosts.tick()
            self.plan.tick()
        # What is printed first: a process that ends may have another started, whose sentinel takes a free number.
        for descriptor in ready:
            if descriptor in self.echo.begun:
                self.echo.hear(descriptor)
        for descriptor in ready:
            if descriptor in self.children:
                self.child_ended(self.children.pop(descriptor))
        if self.scheduling is not None:
            self.scheduling.fire_timers()
        self.striker.tick()
        self.reslicing.tick()
        self.restarting.tick()
        self.servers.tick()
        self.watchman.tick()
        self.peers.tick()
        if (keeper := self._ready_keeper()) is not None:
            keeper.tick()
        if self.interrupts and not self.begun:
            raise KeyboardInterrupt
        if self.interrupts and not self.stopping:
            self.say("stopping after the current iterations; once more to stop at once")
            self.stop_workers("interrupted")
        if not self.begun:
            self.admission.consider_beginning()
        deserted = not self.live_workers() and not self.restarting.due
        if deserted and not self.asked_to_finish and not (self.hosts is not None and self.hosts.may_come_back):
            self._finish()

    def _ready_keeper(self) -> Keeper | None:
        """Who keeps checkpoints, if one can be made now: an order to a server that is being restarted would be lost."""
        ready = self.servers.all_configured and not self.reslicing.under_way
        if self.peers.active:
            return None  # they keep one at the end
        return self.keeper if self.begun and not self.asked_to_finish and ready else None

    def live_workers(self) -> list[Child]:
        return [child for child in self.children.values() if child.role == "worker"]

    def start_worker(self, rank: int) -> None:
        """Start a process for this rank; it becomes a member when it has described its model."""
        incarnation = self.authority.next_incarnation(rank)
        if self.hosts is not None:
            self.adopt(self.hosts.start_worker(rank, incarnation))
            return
        self.enrolling.make(self.folder.path, rank, incarnation)
        self.adopt(self.plan.start_worker(rank, incarnation, self.folder.path))

    def adopt(self, child: Child) -> None:
        self.children[child.sentinel] = child
        if not isinstance(child, FarChild):
            self.waiter.watch(child.sentinel)
        if child.output is not None:
            self.echo.listen(child.output)

    # What is heard.

    def hear_all(self) -> None:
        while (received := self.listener.receive()) is not None:
            self.hear(wire.decode_to_driver(received[1]))

    def hear(self, message: wire.ToDriver) -> None:
        match message:
            case wire.Describe():
                self.admission.take(message)
            case wire.Play():
                self.decks.hear(message)
            case wire.Log():
                self._take_log(message)
            case wire.Leave(stays=True):
                self.peers.take_done(message)
            case wire.Leave():
                self.remove(message.rank, message.incarnation)
            case wire.Without():
                self.peers.go_without(message)
            case wire.Ready():
                self.servers.ready(message)
            case wire.Rejected():
                self.watchman.take_rejected(message)
            case wire.Status():
                self.watchman.take_status(message)
            case wire.PeerStatus():
                self.peers.hear(message)
            case wire.Due():
                if (keeper := self._ready_keeper()) is not None:
                    keeper.begin()
            case wire.Saved():
                if self.keeper is not None and self.lead is not None and self.lead.layout is not None:
                    others = self.folder.path / "others"
                    self.keeper.saved(message, str(self.policy), self.lead.layout, self.servers.assignment, others)
            case wire.Finished():
                self.servers.finished.add(message.shard)
                self.lasting.finished(message.cost)
            case wire.Undurable():
                self.lasting.take(message)
            case wire.Want():
                self.reslicing.want(message)
            case wire.Held():
                self.reslicing.take_held(message)
            case wire.Standing():
                self.reslicing.take_standing(message)
            case wire.Gave():
                self.reslicing.take_gave(message)
            case wire.Ask():
                if self.scheduling is not None:
                    self.scheduling.hear(message.message)
            case _:
                assert_never(message)

    def child_ended(self, child: Child) -> None:
        if not isinstance(child, FarChild):
            self.waiter.forget(child.sentinel)
        code = child.reap()
        if child.output in self.echo.begun:
            self.echo.hear(child.output)
        if child.role == "server":
            self.servers.ended(child, code)
            return
        self.remove(child.rank, child.incarnation)
        self.watchman.forget(child.rank)
        self.enrolling.forget(child.rank, child.incarnation)
        memory.remove(self.folder.path, child.rank, child.incarnation)
        if code == 0:
            self.ended_well += 1
            return  # of a peer, neighbours may not have read the last parameters: its slots stay
        slots.remove(self.folder.path, child.rank, child.incarnation)
        if isinstance(child, FarChild) and child.is_lost:
            self.losses.append(f"{child} was lost with {child.host}")
            return
        if self.restarting.take(child, code):
            return
        joined = self.hosts is not None and bool(self.hosts.meeting.join)  # by somebody else: the run's end is its own
        (self.failures if code > 0 and not joined else self.losses).append(f"{child} {how(code)}")
        self.refused += code == 2
        if self.plan.care.abort:
            raise RunFailed(f"{child} {how(code)}, and the run is to end then")
        others = len(self.live_workers())
        rest = f"; {others} other{' goes' if others == 1 else 's go'} on" if self.begun else ""
        self.say(f"{child} {how(code)}{rest}")

    def remove(self, rank: int, incarnation: int) -> bool:
        """Take a worker out of the membership, if it is in. Whether it was."""
        if self.authority.members.get(rank) != incarnation:
            return False
        self.announce(self.authority.remove(rank))
        return True

    def _take_log(self, log: wire.Log) -> None:
        point = Point(log.at, log.updates, log.values.get("loss"), log.values.get("accuracy"))
        self.history.append(point)
        if self.watch is not None:
            self.watch(point)
        target = self.plan.target
        if target is not None and self.reached_s is None and target.reached(point):
            self.reached_s = log.at
            self.stop_workers(f"reached {target}")

    # Telling, ending.

    def announce(self, view: View) -> None:
        self.decks.announce(self.peers.at_work(view))
        if self.scheduling is not None:
            self.scheduling.announce(view)
        if self.peers.active:
            self.peers.announce(view)
        for shard in self.servers.configured:  # the others are told when they are
            self.servers.tell(shard, wire.NewView(view))

    def tell_worker(self, rank: int, incarnation: int, message: wire.ToWorker) -> None:
        name = f"worker:{rank}:{incarnation}"
        if self.hosts is not None and (host := self.hosts.of("worker", rank, incarnation)) is not None:
            self.hosts.tell_worker(host, name, message)
        else:
            self.listener.send(name.encode(), wire.encode(message))

    def stop_workers(self, reason: str) -> None:
        """Ask the workers to end after their current step."""
        self.stopping = True
        for child in self.live_workers():
            self.tell_worker(child.rank, child.incarnation, wire.Stop(reason))

    def _finish(self) -> None:
        """All workers are gone: collect the parameters."""
        if self.lead is None or self.lead.layout is None or not self.begun:
            raise self.admission.never_began()
        if not self.ended_well and not self.failures:
            self.failures.extend(self.losses)
        if not self.servers.all_configured or self.reslicing.under_way:
            return  # a server is being restarted, or given its part
        if self.keeper is not None and self.keeper.under_way is not None:
            return  # the checkpoint at the end comes after it
        self.asked_to_finish = True
        if self.keeper is not None:
            keep_buffers(self.folder.path)
            self.keeper.begin()
            if self.peers.active:
                self.peers.keep()
        self.servers.tell_all(wire.Finish())

    def _end_all(self) -> None:
        for child in self.children.values():
            child.kill()
        for child in self.children.values():
            child.reap()
        self.children.clear()
