"""The driver of a live run: starts the processes, numbers the views, and notices everything.

It is the one authority on membership. A worker that ends, in whatever way, makes its sentinel readable at
once; the next view goes to the shards within a millisecond, and whoever waited for it is released by them.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, assert_never

import msgspec

from paceline import policies
from paceline.cluster import Cluster, to_table
from paceline.core.messages import Members, View
from paceline.core.policy import Policy
from paceline.errors import ConfigError, PacelineError, RunFailed
from paceline.run import Point, Run, Target
from paceline.runtime.driver import Authority
from paceline.runtime.live import checkpoint, memory, wire
from paceline.runtime.live.children import Child, StartWorker, start_server
from paceline.runtime.live.dealing_out import Decks
from paceline.runtime.live.echo import Echo
from paceline.runtime.live.harvest import harvest, keep_buffers
from paceline.runtime.live.keeping import Keeper, Keeping
from paceline.runtime.live.scheduling import Scheduling
from paceline.runtime.live.sockets import Listener, Waiter
from paceline.runtime.live.striking import Striker
from paceline.runtime.live.watching import Care, Watchman
from paceline.runtime.live.worker import BEGUN
from paceline.tensors.layout import EPS

TICK_S = 0.2
RESTART_S, RESTART_MOST_S = 0.5, 30.0
DEFAULT_POLICY = "bsp"


@dataclass(frozen=True)
class LivePlan:
    """What to run. The policy may be left to the script; `start_worker` makes the processes."""

    members: Members
    start_worker: StartWorker
    policy: Policy | None = None
    cluster: Cluster | None = None
    seed: int = 0
    target: Target | None = None
    care: Care = field(default_factory=Care)
    keeping: Keeping | None = None
    slicing: str = EPS


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
        self.described: dict[tuple[int, int], wire.Describe] = {}
        self.servers_there: set[int] = set()
        self.servers_configured: set[int] = set()
        self.servers_finished: set[int] = set()
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
        self.restarts_left = plan.care.restarts
        self.to_start: list[tuple[float, int]] = []
        """(when, rank) of workers to be started again."""
        self.server_lives = [0] * plan.members.servers
        self.keeper: Keeper | None = None
        self.scheduling: Scheduling | None = None
        """The scheduler, if the policy has one."""
        self.interrupts = 0
        self.stopping = False
        self.epoch_s = time.monotonic()

    def run(self) -> Run:
        self.folder = memory.RunFolder()
        handlers = self._catch_signals()
        try:
            if self.plan.keeping is not None:
                self.keeper = Keeper(self.plan.keeping, self.members.servers, self._order_checkpoint, self.say)
            output = self.folder.path / "trace"
            output.mkdir()
            return self._run(output)
        finally:
            for number in handlers:
                signal.signal(number, signal.SIG_IGN)
            self._end_all()
            self.folder.remove()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _run(self, output: Path) -> Run:
        plan = self.plan
        config = wire.LiveConfig(
            self.members,
            plan.seed,
            to_table(plan.cluster) if plan.cluster is not None else None,
            str(output),
            plan.slicing,
        )
        (self.folder.path / "config").write_bytes(msgspec.json.encode(config))
        self.listener = Listener(self.folder.path / "driver")
        self.waiter = Waiter()
        try:
            self.waiter.watch(self.listener)
            self.echo = Echo(self.waiter, self.say)
            for shard in range(self.members.servers):
                self._adopt(start_server(self.folder.path, shard, 0))
            for rank in range(self.members.workers):
                self.start_worker(rank)
            while not self.done():
                self.turn()
            for sentinel in list(self.children):
                self.child_ended(self.children.pop(sentinel))
            if self.scheduling is not None:
                self.scheduling.close()
            return harvest(self, output)
        finally:
            if self.scheduling is not None:
                self.scheduling.close()
            self.echo.close_all()
            self.listener.close()
            self.waiter.close()

    def done(self) -> bool:
        return self.asked_to_finish and len(self.servers_finished) == self.members.servers

    def turn(self) -> None:
        """Wait for something to happen, and deal with it."""
        ready = self.waiter.wait(TICK_S)
        while (received := self.listener.receive()) is not None:
            self.hear(wire.decode_to_driver(received[1]))
        # What is printed first: a process that ends may have another started, whose sentinel takes a free number.
        for descriptor in ready:
            if descriptor in self.echo.begun:
                self.echo.hear(descriptor)
        for descriptor in ready:
            if descriptor in self.children:
                self.child_ended(self.children.pop(descriptor))
        self.striker.tick()
        self._start_due()
        self.watchman.tick()
        if (keeper := self._ready_keeper()) is not None:
            keeper.tick()
        if self.interrupts and not self.begun:
            raise KeyboardInterrupt
        if self.interrupts and not self.stopping:
            self.say("stopping after the current iterations; once more to stop at once")
            self.stop_workers("interrupted")
        if not self.begun:
            self._consider_beginning()
        if not self.live_workers() and not self.to_start and not self.asked_to_finish:
            self._finish()

    def _ready_keeper(self) -> Keeper | None:
        """Who keeps checkpoints, if one can be made now: an order to a server that is being restarted would be lost."""
        all_there = len(self.servers_configured) == self.members.servers
        return self.keeper if self.begun and not self.asked_to_finish and all_there else None

    def live_workers(self) -> list[Child]:
        return [child for child in self.children.values() if child.role == "worker"]

    def start_worker(self, rank: int) -> None:
        """Start a process for this rank; it becomes a member when it has described its model."""
        incarnation = self.authority.next_incarnation(rank)
        self._adopt(self.plan.start_worker(rank, incarnation, self.folder.path))

    def _adopt(self, child: Child) -> None:
        self.children[child.sentinel] = child
        self.waiter.watch(child.sentinel)
        if child.output is not None:
            self.echo.listen(child.output)

    # What is heard.

    def hear(self, message: wire.ToDriver) -> None:
        match message:
            case wire.Describe():
                self.described[message.rank, message.incarnation] = message
                if self.stopping:
                    self.tell_worker(message.rank, message.incarnation, wire.Stop("the run is ending"))
                elif self.begun:
                    self._admit_late(message)
            case wire.Play():
                self.decks.hear(message)
            case wire.Log():
                self._take_log(message)
            case wire.Leave():
                self._remove(message.rank, message.incarnation)
            case wire.Ready():
                self._server_ready(message)
            case wire.Rejected():
                self.say(
                    f"rejected the gradient of worker {message.worker}, iteration {message.iteration}: {message.reason}"
                )
            case wire.Status():
                self.watchman.take_status(message)
            case wire.Due():
                if (keeper := self._ready_keeper()) is not None:
                    keeper.begin()
            case wire.Saved():
                if self.keeper is not None and self.lead is not None and self.lead.layout is not None:
                    self.keeper.saved(message, str(self.policy), self.lead.layout, self.folder.path / "others")
            case wire.Finished():
                self.servers_finished.add(message.shard)
            case wire.Ask() | wire.Report():
                if self.scheduling is not None:
                    self.scheduling.hear(message)
            case _:
                assert_never(message)

    def child_ended(self, child: Child) -> None:
        self.waiter.forget(child.sentinel)
        code = child.reap()
        if child.output in self.echo.begun:
            self.echo.hear(child.output)
        if child.role == "server":
            self._server_ended(child, code)
            return
        self._remove(child.rank, child.incarnation)
        self.watchman.forget(child.rank)
        memory.remove(self.folder.path, child.rank, child.incarnation)
        if code == 0:
            self.ended_well += 1
            return
        if (pause := self.striker.restart_pause(child, code)) is not None and not self.stopping:
            self.say(f"{child} {_how(code)}, as the scenario says; starting it again in {pause:g} s")
            self.to_start.append((time.monotonic() + pause, child.rank))
            return
        if self.restarts_left and not self.stopping:
            self._restart_later(child, code)
            return
        (self.failures if code > 0 else self.losses).append(f"{child} {_how(code)}")
        self.refused += code == 2
        if self.plan.care.abort:
            raise RunFailed(f"{child} {_how(code)}, and the run is to end then")
        others = len(self.live_workers())
        self.say(f"{child} {_how(code)}; {others} other{' goes' if others == 1 else 's go'} on")

    def _restart_later(self, child: Child, code: int) -> None:
        """Start the rank again after a pause that doubles with each of its lives."""
        self.restarts_left -= 1
        pause = min(RESTART_S * 2**child.incarnation, RESTART_MOST_S)
        self.say(f"{child} {_how(code)}; starting it again in {pause:g} s ({self.restarts_left} restarts left)")
        self.to_start.append((time.monotonic() + pause, child.rank))

    def _start_due(self) -> None:
        due = [entry for entry in self.to_start if entry[0] <= time.monotonic() or self.stopping]
        for entry in due:
            self.to_start.remove(entry)
            if not self.stopping:
                self.start_worker(entry[1])

    def _hear_last_words(self, server: Child) -> None:
        """It ended as asked; that it said so may be noticed after that it is gone."""
        until = time.monotonic() + TICK_S
        while server.rank not in self.servers_finished and time.monotonic() < until:
            self.waiter.wait(TICK_S / 20)
            while (received := self.listener.receive()) is not None:
                self.hear(wire.decode_to_driver(received[1]))

    def _server_ended(self, child: Child, code: int) -> None:
        if code == 0 and self.asked_to_finish:
            self._hear_last_words(child)
        if child.rank in self.servers_finished:
            return
        checkpoint = self.keeper.last if self.keeper is not None else None
        if self.asked_to_finish or not self.begun or checkpoint is None:
            raise RunFailed(
                f"{child} {_how(code)} and there is no checkpoint to restart it from: "
                "the run cannot go on without its part of the model"
            )
        self.say(f"{child} {_how(code)}; restarting it from {checkpoint}: its updates since then are lost")
        assert self.keeper is not None
        if self.keeper.under_way is not None:
            self.keeper.give_up(f"{child} {_how(code)}")
        self.servers_there.discard(child.rank)
        self.servers_configured.discard(child.rank)
        self.server_lives[child.rank] += 1
        self._adopt(start_server(self.folder.path, child.rank, self.server_lives[child.rank]))

    def _server_ready(self, ready: wire.Ready) -> None:
        if not ready.configured:
            self.servers_there.add(ready.shard)
            if self.begun:
                self._configure_server(ready.shard)
            return
        self.servers_configured.add(ready.shard)
        if self.begun:
            view = self.authority.view()
            self._tell_server(ready.shard, wire.NewView(view))
            for rank, incarnation in view.members:
                self.tell_worker(rank, incarnation, wire.Reopened(ready.shard, self.server_lives[ready.shard]))

    def _remove(self, rank: int, incarnation: int) -> bool:
        """Take a worker out of the membership, if it is in. Whether it was."""
        if self.authority.members.get(rank) != incarnation:
            return False
        self._announce(self.authority.remove(rank))
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

    # Beginning, joining, ending.

    def _consider_beginning(self) -> None:
        """Begin when every worker that is alive has described its model and every server is configured."""
        workers = self.live_workers()
        missing = [str(c) for c in workers if (c.rank, c.incarnation) not in self.described]
        self.watchman.tell_missing(missing)
        if not workers or missing or self.to_start:
            return
        if len(self.servers_there) < self.members.servers:
            return
        if self.lead is None:
            self._configure()
        elif len(self.servers_configured) == self.members.servers:
            self.begun = True
            (self.folder.path / BEGUN).touch()
            if self.keeper is not None and self.keeper.keeping.resume and self.keeper.last is not None:
                shutil.copy(checkpoint.others_of(self.keeper.last), self.folder.path / "others")
            self._announce(self.authority.admit({child.rank: child.incarnation for child in workers}))
            for child in workers:
                self._welcome(self.described[child.rank, child.incarnation])

    def _configure(self) -> None:
        lead = self.described.get((0, self.authority.incarnations.get(0, 0)))
        if lead is None or lead.layout is None or lead.optimizer is None:
            raise self._never_began()
        self.lead = lead
        if self.keeper is not None:
            self.keeper.check_layout(lead.layout)
        if self.policy is None:
            self.policy = policies.parse(lead.policy or DEFAULT_POLICY)
        policies.check_live(self.policy).validate(self.members)
        self.epoch_s = time.monotonic()
        if self.policy.has_scheduler:
            self.scheduling = Scheduling(self, self.policy, self.folder.path / "trace")
        for shard in range(self.members.servers):
            self._configure_server(shard)

    def _configure_server(self, shard: int) -> None:
        assert self.lead is not None
        assert self.lead.layout is not None
        assert self.lead.optimizer is not None
        optimizer, hyper = self.lead.optimizer, self.watchman.hyper
        if hyper is not None:  # a server that is restarted goes on with what schedulers have changed
            optimizer = msgspec.structs.replace(optimizer, groups=hyper)
        checkpoint = self.keeper.last if self.keeper is not None else None
        every = self.plan.keeping.every_updates if self.plan.keeping is not None else None
        configure = wire.Configure(
            str(self.policy), self.lead.layout, optimizer, self.epoch_s,
            str(checkpoint) if checkpoint is not None else None, every,
        )  # fmt: skip
        self._tell_server(shard, configure)

    def _order_checkpoint(self, folder: Path) -> dict[int, int]:
        for shard in range(self.members.servers):
            self._tell_server(shard, wire.Checkpoint(str(folder)))
        return self.decks.unfinished()

    def _admit_late(self, described: wire.Describe) -> None:
        if self._fits(described):
            self._announce(self.authority.admit({described.rank: described.incarnation}))
            self.say(f"worker {described.rank} joined")
            self._welcome(described)

    def _welcome(self, described: wire.Describe) -> None:
        if self._fits(described):
            resumed = self.keeper is not None and self.keeper.keeping.resume
            begin = wire.Begin(
                self.authority.view(), str(self.policy), self.epoch_s, self.watchman.hyper, tuple(self.server_lives),
                resumed,
            )  # fmt: skip
            self.tell_worker(described.rank, described.incarnation, begin)

    def _fits(self, described: wire.Describe) -> bool:
        assert self.lead is not None
        if described.digest == self.lead.digest:
            return True
        reason = (
            f"the model of worker {described.rank} differs from worker 0's "
            "(names, shapes, groups or dtype of the parameters, kind of optimizer, policy): "
            "build the same on every worker"
        )
        self._remove(described.rank, described.incarnation)
        self.tell_worker(described.rank, described.incarnation, wire.Refuse(reason))
        return False

    def _announce(self, view: View) -> None:
        self.decks.announce(view)
        if self.scheduling is not None:
            self.scheduling.announce(view)
        for shard in self.servers_configured:  # the others are told when they are
            self._tell_server(shard, wire.NewView(view))

    def _tell_server(self, shard: int, message: wire.ToServer) -> None:
        self.listener.send(b"server:%d" % shard, wire.encode(message))

    def tell_worker(self, rank: int, incarnation: int, message: wire.ToWorker) -> None:
        self.listener.send(b"worker:%d:%d" % (rank, incarnation), wire.encode(message))

    def stop_workers(self, reason: str) -> None:
        """Ask the workers to end after their current step."""
        self.stopping = True
        for child in self.live_workers():
            self.tell_worker(child.rank, child.incarnation, wire.Stop(reason))

    def _finish(self) -> None:
        """All workers are gone: collect the parameters."""
        if self.lead is None or self.lead.layout is None or not self.begun:
            raise self._never_began()
        if not self.ended_well and not self.failures:
            self.failures.extend(self.losses)
        if len(self.servers_configured) < self.members.servers:
            return  # a server is being restarted
        if self.keeper is not None and self.keeper.under_way is not None:
            return  # the checkpoint at the end comes after it
        self.asked_to_finish = True
        if self.keeper is not None:
            keep_buffers(self.folder.path)
            self.keeper.begin()
        for shard in range(self.members.servers):
            self._tell_server(shard, wire.Finish())

    def _never_began(self) -> PacelineError:
        """Why nothing was trained."""
        why = "; ".join([*self.failures, *self.losses])
        if self.refused and self.refused == len(self.failures):
            return ConfigError(f"{why}: see above")
        if why:
            return RunFailed(f"{why}, before the run began")
        return RunFailed("the script ended without making a paceline.Optimizer: nothing was trained")

    def _catch_signals(self) -> dict[int, Any]:
        """Ctrl-C or SIGTERM once: finish. Twice: stop now."""

        def interrupted(number: int, frame: FrameType | None) -> None:
            self.interrupts += 1
            if self.interrupts == 2:
                raise KeyboardInterrupt

        if threading.current_thread() is not threading.main_thread():
            return {}
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        return {number: signal.signal(number, interrupted) for number in caught}

    def _end_all(self) -> None:
        for child in self.children.values():
            child.kill()
        for child in self.children.values():
            child.reap()
        self.children.clear()


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"failed with exit code {code}" if code else "ended"
