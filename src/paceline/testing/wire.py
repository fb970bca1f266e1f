"""The fake wire: machines, what is in flight between them, workers that die and come back. See `paceline.testing`."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from paceline.core.actions import AbortCompute, Answer, Compute, Send, SetTimer
from paceline.core.events import (
    ComputeAborted,
    Event,
    GradientReady,
    NotifyArrived,
    ParametersArrived,
    PlanArrived,
    PullArrived,
    PullRepeated,
    PushArrived,
    PushRejected,
    ReleaseArrived,
    ResyncArrived,
    RiseArrived,
    TimerFired,
    ViewChanged,
)
from paceline.core.machine import Machine
from paceline.core.messages import (
    Members,
    Message,
    Node,
    Notify,
    Parameters,
    Plan,
    Pull,
    Push,
    Release,
    Resync,
    Rise,
    Role,
    View,
)
from paceline.core.policy import CentralPolicy
from paceline.core.scheduler import SCHEDULER
from paceline.core.shard import Shard
from paceline.core.trace import Header, Record
from paceline.core.words import Process, asker, in_words, name
from paceline.core.worker import Worker
from paceline.testing.ledger import Ledger
from paceline.testing.story import PolicyBroken, Story

Link = tuple[Process, int, bool]
"""What joins a process and a shard, in one direction (True: to the shard)."""

SCHEDULING = -1
"""The scheduler's place in a link. A shard that reports to it does so as the process (SCHEDULING, shard)."""

MachineFactory = Callable[[Role, int, Members, int], Machine]
"""`policy.machine`, or a substitute that breaks a rule on purpose."""


class Run:
    """One random run: the machines, what is in flight, and the authority on membership."""

    def __init__(
        self, policy: CentralPolicy, header: Header, iterations: int, patience: int, make: MachineFactory
    ) -> None:
        self.story = Story(header)
        self.policy = policy
        self.members = header.members
        self.iterations = iterations
        self.make = make
        self.ledgers = [Ledger(policy, shard, self.story, patience) for shard in range(self.members.servers)]
        self.random = Random(header.seed)
        self.now = 0.0
        self.order = count()
        self.flight: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.links: defaultdict[Link, deque[Message]] = defaultdict(deque)
        self.slowness = self.random.choice((0.1, 0.5, 2.0))
        self.pace: defaultdict[Any, float] = defaultdict(lambda: self.random.choice((0.3, 1.0, 1.0, 8.0)))
        self.shards = [self.start("server", shard) for shard in range(self.members.servers)]
        self.scheduler = self.start("scheduler", 0) if policy.has_scheduler else None
        self.processes: dict[Process, Machine] = {}
        self.expelled: set[Process] = set()
        """Those that were given up but go on."""
        self.computed: dict[Process, tuple[int, int]] = {}
        """The iteration each process was ordered to compute last, and the attempt at it."""
        self.running: dict[Process, Compute] = {}
        self.incarnations: dict[int, int] = {}
        self.view = View(0, ())
        self.faults = False
        self.said: dict[tuple[Process, int], list[Push | Pull]] = {}
        """What each process said last to each shard, for a new life of that."""
        self.lives = [0] * self.members.servers
        self.down: set[tuple[Process, int]] = set()
        """Who has not met the new life of a shard yet: what they say to each other meanwhile is lost."""
        self.luck = Random(f"servers {header.seed}")
        """What happens to servers is drawn apart: the rest of a run is the same with and without."""

    def start(self, role: Role, rank: int) -> Machine:
        machine = self.make(role, rank, self.members, self.story.trace.header.seed)
        machine.checks = True
        return machine

    def play(self, faults: bool) -> Story:
        self.faults = faults
        self.join(*range(self.members.workers))
        usual = (1 + 3 * self.members.servers) * self.members.workers * self.iterations
        kills, joins = self.random.randint(0, 4) * faults, self.random.randint(0, 1) * faults
        troubles = [(self.random.randrange(usual), trouble) for trouble in [self.kill] * kills + [self.join] * joins]
        strikes = self.luck.choice((0, 0, 1, 3)) * faults
        troubles += [(self.luck.randrange(usual), self.strike) for _ in range(strikes)]
        for done in count():
            for when, trouble in troubles:
                if when == done:
                    trouble()
            if not self.flight or done > 100 * usual:
                break
            self.now, _, deliver, what = heappop(self.flight)
            deliver(*what)
        self.judge_end()
        return self.story

    def judge_end(self) -> None:
        self.story.expect(not self.flight, "hang", "the run does not come to an end")
        stuck = [name(process) for process in self.processes if process not in self.expelled]
        asked = [in_words(pull) for ledger in self.ledgers for pull in ledger.asked.values()]
        self.story.expect(not stuck, "hang", f"nothing is in flight, workers {stuck} are not done: {asked}")
        for ledger in self.ledgers:
            left = ledger.left()
            self.story.expect(not left, "handles", f"never applied nor dropped: {left}")

    def later(self, delay: float, deliver: Callable[..., None], *what: Any) -> None:
        heappush(self.flight, (self.now + delay, next(self.order), deliver, what))

    def delay(self) -> float:
        return self.random.expovariate(1 / self.slowness)

    def send(self, link: Link, message: Message) -> None:
        self.links[link].append(message)
        self.later(self.delay() * self.pace[link], self.deliver, link)

    def deliver(self, link: Link) -> None:
        """The oldest message of a link arrives, unless it was cut off."""
        process, shard, _ = link
        match self.links[link].popleft() if self.links[link] else None:
            case Push() as push:
                self.push(shard, push)
                if self.faults and self.random.random() < 0.05:
                    self.later(self.delay() * 5, self.push, shard, push)
            case Pull() as pull:
                self.pull(shard, pull)
                if self.faults and self.random.random() < 0.05:
                    self.later(self.delay() * 5, self.pull, shard, pull)
            case Parameters() as parameters:
                self.step(Node("worker", process[0]), ParametersArrived(self.now, parameters), process)
            case Rise() as rise:
                self.step(SCHEDULER, RiseArrived(self.now, rise))
            case Release() as release:
                self.step(Node("worker", process[0]), ReleaseArrived(self.now, release), process)
            case Notify() as notify:
                self.notify(notify)
                if self.faults and self.random.random() < 0.05:
                    self.later(self.delay() * 5, self.notify, notify)
            case Resync() as resync:
                self.resync(process, resync)
                if self.faults and self.random.random() < 0.05:
                    self.later(self.delay() * 5, self.resync, process, resync)
            case Plan() as plan:
                self.step(Node("server", process[1]), PlanArrived(self.now, plan))

    def push(self, shard: int, push: Push) -> None:
        bad = self.faults and self.random.random() < 0.03
        machine = self.shards[shard]
        wanted = isinstance(machine, Shard) and machine.gate.wants_significance
        significance = self.random.expovariate(2.0) if wanted else None
        event = PushRejected(self.now, push, "not finite") if bad else PushArrived(self.now, push, significance)
        self.step(Node("server", shard), event)

    def pull(self, shard: int, pull: Pull) -> None:
        node = SCHEDULER if shard == SCHEDULING else Node("server", shard)
        self.step(node, PullArrived(self.now, pull))

    def notify(self, notify: Notify) -> None:
        self.step(SCHEDULER, NotifyArrived(self.now, notify))

    def resync(self, process: Process, resync: Resync) -> None:
        self.step(Node("worker", process[0]), ResyncArrived(self.now, resync), process)

    def step(self, node: Node, event: Event, process: Process = (0, 0)) -> None:
        """Hand an event to a machine, judge what it orders, carry it out. The dead hear nothing."""
        machine = self.machine_at(node, process)
        if machine is None:
            return
        self.story.counts["deliveries"] += 1
        try:
            actions = machine.handle(event)
        except Exception as error:
            self.story.trace.records.append(Record(node, process[1], event, ()))
            raise PolicyBroken("machine", f"{node}: {type(error).__name__}: {error}", self.story) from error
        self.story.trace.records.append(Record(node, process[1], event, tuple(actions)))
        if node.role == "server":
            self.ledgers[node.rank].note(event)
            self.ledgers[node.rank].judge(actions)
        for action in actions:
            self.story.counts[type(action).__name__] += 1
            match action:
                case Answer(parameters):
                    if (asker(parameters), node.rank) in self.down:
                        continue  # a new life answers only those it has heard: they will ask again
                    self.send((asker(parameters), node.rank, False), parameters)
                case Send(to, message):
                    if to.role == "server" and isinstance(message, Push | Pull):
                        self.remember(process, to.rank, message)
                        if (process, to.rank) in self.down:
                            continue
                    self.send(self.link(node, process, to, message), message)
                case Compute():
                    self.compute(process, action)
                case AbortCompute():
                    self.abort(process, action)
                case SetTimer(timer, after_s):
                    due = self.now + after_s
                    self.later(after_s, self.step, node, TimerFired(due, timer), process)

    def machine_at(self, node: Node, process: Process) -> Machine | None:
        if node.role == "server":
            return self.shards[node.rank]
        return self.scheduler if node == SCHEDULER else self.processes.get(process)

    def link(self, sender: Node, process: Process, to: Node, message: Message) -> Link:
        """The way a message takes. What a scheduler lets pass is judged when it leaves."""
        if isinstance(message, Release):
            i, V = message.iteration - 1, min(ledger.V for ledger in self.ledgers)
            together = self.policy.in_force(0, V).may_pull(i, V)
            self.story.expect(together, "together", f"{in_words(message)}, a shard is at V={V}")
            return asker(message), SCHEDULING, False
        if isinstance(message, Resync):
            return asker(message), SCHEDULING, False
        if isinstance(message, Plan):
            return (SCHEDULING, to.rank), SCHEDULING, False
        if sender.role == "server":
            process = (SCHEDULING, sender.rank)
        return process, to.rank if to.role == "server" else SCHEDULING, True

    def compute(self, process: Process, compute: Compute) -> None:
        iteration, attempts = self.computed.get(process, (-1, 0))
        new = compute.iteration > iteration and compute.attempt == 0
        again = (compute.iteration, compute.attempt) == (iteration, attempts + 1) and process not in self.running
        self.story.expect(new or again, "answer", f"worker {name(process)} is to {in_words(compute)} again")
        self.computed[process] = (compute.iteration, compute.attempt)
        for ledger in self.ledgers:
            ledger.judge_bound(process, compute.iteration)
        if compute.iteration < self.iterations:
            duration = self.pace[process] * self.random.uniform(0.5, 1.5)
            sizes = self.story.trace.header.slice_bytes
            ready = GradientReady(self.now + duration, compute.iteration, compute.attempt, sizes)
            self.running[process] = compute
            self.later(duration, self.finish, process, compute, ready)
        else:
            del self.processes[process]
            self.lose(process)

    def finish(self, process: Process, compute: Compute, ready: GradientReady) -> None:
        if self.running.get(process) == compute:
            del self.running[process]
            self.step(Node("worker", process[0]), ready, process)

    def abort(self, process: Process, abort: AbortCompute) -> None:
        """It comes in time, or the computation is as good as done and beats it."""
        runs = self.running.get(process) == Compute(abort.iteration, abort.attempt)
        self.story.expect(runs, "abort", f"worker {name(process)} is to {in_words(abort)}, which it does not compute")
        self.story.expect(abort.attempt == 0, "abort", f"worker {name(process)} is to {in_words(abort)}")
        if self.random.random() < 0.7:
            del self.running[process]
            delay = self.delay()
            aborted = ComputeAborted(self.now + delay, abort.iteration, abort.attempt)
            self.later(delay, self.step, Node("worker", process[0]), aborted, process)

    def kill(self) -> None:
        """A worker dies, or is only thought to have died."""
        victims = sorted(self.processes.keys() - self.expelled)
        if not victims:
            return
        self.story.counts["kills"] += 1
        victim = self.random.choice(victims)
        if victim in self.computed and self.random.random() < 0.2:
            self.expelled.add(victim)
        else:
            del self.processes[victim]
            for shard in (*range(self.members.servers), *([SCHEDULING] if self.scheduler is not None else [])):
                sent = self.links[victim, shard, True]
                for _ in range(self.random.randint(0, len(sent))):
                    sent.pop()
        self.later(self.delay(), self.lose, victim)
        if len(victims) == 1 or self.random.random() < 0.6:
            self.later(self.delay(), self.join, victim[0])

    def remember(self, process: Process, shard: int, message: Push | Pull) -> None:
        before = self.said.get((process, shard), [])
        follows = isinstance(message, Pull) and before and isinstance(before[-1], Push)
        self.said[process, shard] = [*before, message] if follows else [message]

    def strike(self) -> None:
        """A durable server is killed: its machine comes back as it was, and all that was under way is lost."""
        shard = self.luck.randrange(self.members.servers)
        self.lives[shard] += 1
        self.story.counts["strikes"] += 1
        for process in list(self.processes):
            self.links[process, shard, True].clear()
            self.links[process, shard, False].clear()
            self.down.add((process, shard))
            self.later(self.luck.expovariate(1 / self.slowness), self.meet_again, process, shard, self.lives[shard])

    def meet_again(self, process: Process, shard: int, life: int) -> None:
        """A process meets the new life of a server. If it waits for an answer it says again what it said last."""
        if life != self.lives[shard]:
            return
        self.down.discard((process, shard))
        machine = self.processes.get(process)
        if not isinstance(machine, Worker) or not (shard in machine.waiting or machine.pausing):
            return
        for message in self.said.get((process, shard), ()):
            if isinstance(message, Push):
                self.push(shard, message)
            else:
                self.step(Node("server", shard), PullRepeated(self.now, message))

    def lose(self, process: Process) -> None:
        if process in self.view.members:
            self.announce({rank: life for rank, life in self.view.members if rank != process[0]})

    def join(self, *ranks: int) -> None:
        """These ranks start, under their next incarnation; without any, a new one does."""
        started = {rank: self.incarnations.get(rank, -1) + 1 for rank in ranks or [len(self.incarnations)]}
        self.story.counts["joins"] += len(started)
        self.incarnations |= started
        for process in started.items():
            self.processes[process] = self.start("worker", process[0])
        self.announce(dict(self.view.members) | started)

    def announce(self, members: dict[int, int]) -> None:
        self.view = View(self.view.number + 1, tuple(sorted(members.items())))
        receivers = [(Node("server", shard), (0, 0)) for shard in range(self.members.servers)]
        receivers += [(SCHEDULER, (0, 0))] if self.scheduler is not None else []
        receivers += [(Node("worker", process[0]), process) for process in self.processes]
        for node, process in receivers:
            delay = self.delay() * self.random.choice((1, 4))
            self.later(delay, self.step, node, ViewChanged(self.now + delay, self.view), process)
