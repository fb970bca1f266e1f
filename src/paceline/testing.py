"""A fake wire that joins the machines of a policy, and a judge that watches: no clock, no sockets, no torch.

    story = play(SSP(staleness=2), workers=4, iterations=10, seed=7)

plays one random run and raises `PolicyBroken` if the policy broke a rule. Equal seeds give equal runs, so the
seed in the error is all it takes to see the failure again, and `error.story.trace` holds every step.

What is random. Each (sender, receiver) link is first in, first out, and has its own pace; computing takes as
long as it likes. With `faults`, workers are killed: what they had sent may still arrive (a ghost), cut off
after a random prefix of each link; what they had not sent never does. Some are only *thought* dead and go on.
The same rank comes back under the next incarnation, often before anybody noticed that it had gone, and new
ranks join. One authority numbers the views; each receiver gets each view after a delay of its own, so a join
overtakes a loss. A push may arrive twice, the second time much later; a slice may be rejected. A worker that
is to compute iteration `iterations` is done and leaves.

What is judged, from a ledger of what was delivered and the policy's `finishes`, never from the machines' fields:

- *hang*: when nothing is in flight any more, every live worker has reached the last iteration;
- *parked*: a pull is answered or parked at once, and stays parked only while some other live member has not
  passed what the puller has: once all of them have pushed, or promised to skip, every iteration below the one
  asked for, there is nothing to wait for. So a wait for c lasts at most the sum of c - next[x] pushes, over
  the members x with next[x] < c, and a death only shortens it. `patience` adds to c, for a policy that lets
  others run ahead of a parked worker (a planned barrier);
- *handles*: each gradient that arrived is consumed once, by `Apply` or `Drop`, and none is left at the end.
  None that did not arrive, or came from a stranger, or was rejected, is applied;
- *late*: a good gradient of a live member is dropped only if its iteration was finished before it came;
- *bound* (a policy with a `staleness` s, and BSP with s = 0): an answer for iteration c leaves no live member
  of that shard's view below c - s, and a worker starts c only on such answers, from every shard;
- *mean* (not `on_arrival`): one `Apply` is of one iteration, finished by this very event, and all its
  gradients were computed on exactly the version it changes: staleness 0;
- *answer*: to a member that asked, for at least the iteration it asked for, with the shard's version, saying
  truly whether its last push was dropped.

Whatever a machine raises, its own `check()` included, is rule *machine*. Write a policy, then play it a
thousand times: a condition that is wrong in one interleaving of a thousand shows within seconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any, assert_never

from paceline.core.actions import Action, Answer, Apply, Compute, Drop, Park, Send
from paceline.core.events import (
    Event,
    GradientReady,
    ParametersArrived,
    PullArrived,
    PushArrived,
    PushRejected,
    ViewChanged,
)
from paceline.core.machine import Machine
from paceline.core.messages import Handle, Members, Message, Node, Parameters, Pull, Push, Role, View
from paceline.core.policy import CentralPolicy
from paceline.core.trace import Header, Record, Trace
from paceline.policies.bsp import BSP

Process = tuple[int, int]
"""One life of a worker: its rank and its incarnation."""

Link = tuple[Process, int, bool]
"""What joins a process and a shard, in one direction (True: to the shard)."""

MachineFactory = Callable[[Role, int, Members, int], Machine]
"""`policy.machine`, or a substitute that breaks a rule on purpose."""


class Story:
    """What happened. `counts`: deliveries, kills, joins, and each kind of action by name ("Apply", ...)."""

    def __init__(self, header: Header) -> None:
        self.trace = Trace(header)
        self.counts: Counter[str] = Counter()

    def expect(self, condition: bool, rule: str, what: str) -> None:
        if not condition:
            raise PolicyBroken(rule, what, self)

    def lines(self, last: int) -> list[str]:
        lines = []
        for record in self.trace.records[-last:]:
            lines.append(f"{record.event.at:8.2f} {record.node}: {in_words(record.event)}")
            lines.extend(f"{'':10}-> {in_words(action)}" for action in record.actions)
        return lines


class PolicyBroken(AssertionError):
    """A policy broke a rule. `rule` is one word of the list above; the message ends with the last steps."""

    def __init__(self, rule: str, what: str, story: Story) -> None:
        header = story.trace.header
        title = f"{rule}: {what} ({header.policy}, {header.members}, seed {header.seed})"
        super().__init__("\n".join([title, *story.lines(last=25)]))
        self.rule = rule
        self.story = story


class Ledger:
    """What one shard was told and what it ordered, kept apart from the machine: the naive way, and slow."""

    def __init__(self, policy: CentralPolicy, story: Story, patience: int) -> None:
        self.policy = policy
        self.workers = story.trace.header.members.workers
        self.expect = story.expect
        self.patience = patience
        self.view = View(0, ())
        self.next: dict[Process, int] = {}
        """Of the members: the first iteration that was neither pushed nor skipped."""
        self.V = self.V_before = 0
        self.asked: dict[Process, Pull] = {}
        self.parked: set[Process] = set()
        self.lowest: dict[Process, int] = {}
        """The smallest `next` of all members at the answer each process got last."""
        self.fate: dict[Handle, str] = {}
        """Of each gradient that arrived: good, bad (rejected, or from a stranger), consumed."""
        self.dropped: set[Process] = set()
        self.version = 0

    def note(self, event: Event) -> None:
        self.V_before = self.V
        match event:
            case ViewChanged(view=view) if view.number > self.view.number:
                self.view = view
                self.next = {process: at for process, at in self.next.items() if process in view.members}
                self.rise()
                self.next = dict.fromkeys(view.members, self.V) | self.next
                self.parked &= self.next.keys()
                for process, pull in self.asked.items():
                    self.promise(process, pull.iteration)
            case PushArrived(push=push) | PushRejected(push=push) if push.handle not in self.fate:
                process = author(push.handle)
                good = process in self.next and isinstance(event, PushArrived)
                self.fate[push.handle] = "good" if good else "bad"
                self.dropped.discard(process)
                self.promise(process, push.handle.iteration + 1)
            case PullArrived(pull=pull):
                self.asked[asker(pull)] = pull
                self.promise(asker(pull), pull.iteration)
        self.asked = {process: pull for process, pull in self.asked.items() if not self.is_ghost(process)}
        self.rise()

    def rise(self) -> None:
        while self.next and self.policy.finishes(self.passed(self.V), len(self.next), self.workers):
            self.V += 1

    def promise(self, process: Process, iteration: int) -> None:
        if process in self.next:
            self.next[process] = max(self.next[process], iteration)

    def passed(self, iteration: int) -> int:
        return sum(at > iteration for at in self.next.values())

    def is_ghost(self, process: Process) -> bool:
        """Not a member, and a later life of the same rank was named or has asked."""
        lives = [life for rank, life in (*self.view.members, *self.asked) if rank == process[0]]
        return process not in self.next and process[1] < max(lives)

    def judge(self, actions: list[Action]) -> None:
        for action in actions:
            what = in_words(action)
            match action:
                case Apply():
                    self.judge_apply(action, what)
                case Drop(handle):
                    fate = self.fate.get(handle, "not here")
                    self.expect(fate in ("good", "bad"), "handles", f"{what}, but it is {fate}")
                    late = handle.iteration < self.V_before
                    self.expect(late or fate == "bad", "late", f"{what}, at V={self.V_before}")
                    self.fate[handle] = "consumed"
                    self.dropped.add(author(handle))
                case Answer(parameters):
                    self.judge_answer(parameters, what)
                case Park(pull, reason, waits_for, waits_for_count):
                    self.expect(self.asked.get(asker(pull)) == pull, "parked", f"nobody asked: {what}")
                    others = {rank for rank, _ in self.next} - {pull.worker}
                    known = set(waits_for) <= others and 0 < waits_for_count <= len(others) and reason
                    self.expect(bool(known), "parked", f"for whom? {what}")
                    self.parked.add(asker(pull))
                case Compute() | Send():
                    self.expect(False, "answer", f"a shard may not {what}")
                case _:
                    assert_never(action)
        for process, pull in self.asked.items():
            if process in self.next:
                self.expect(process in self.parked, "parked", f"not even parked: {in_words(pull)}")
                others_at = [at for other, at in self.next.items() if other != process]
                waits = any(at < pull.iteration + self.patience for at in others_at)
                self.expect(waits, "parked", f"waits for nobody: {in_words(pull)}")

    def judge_apply(self, apply: Apply, what: str) -> None:
        for handle in apply.handles:
            fate = self.fate.get(handle, "not here")
            self.expect(fate == "good", "handles", f"{what}, but {handle} is {fate}")
            self.fate[handle] = "consumed"
        sound = apply.handles and apply.version == self.version + 1 and 0 < apply.weight <= 1
        self.expect(bool(sound), "handles", f"{what}, the version was {self.version}")
        if not self.policy.on_arrival:
            iterations = {handle.iteration for handle in apply.handles}
            finished = len(iterations) == 1 and self.V_before <= min(iterations) < self.V
            self.expect(finished, "mean", f"{what}, V rose from {self.V_before} to {self.V}")
            stale = [handle for handle in apply.handles if handle.version != self.version]
            self.expect(not stale, "mean", f"{what} has stale gradients: {stale}")
            self.V_before = min(iterations) + 1
        self.version = apply.version

    def judge_answer(self, parameters: Parameters, what: str) -> None:
        process = asker(parameters)
        pull = self.asked.pop(process, None)
        self.parked.discard(process)
        asked = process in self.next and pull is not None and pull.iteration <= parameters.iteration
        self.expect(asked, "answer", f"{what}, which asked for {pull}")
        self.expect(parameters.version == self.version, "answer", f"{what}, the version is {self.version}")
        self.expect(parameters.dropped == (process in self.dropped), "answer", f"{what}, not so")
        self.lowest[process] = min(self.next.values())
        self.judge_bound(process, parameters.iteration)

    def judge_bound(self, process: Process, iteration: int) -> None:
        bound = getattr(self.policy, "staleness", 0 if isinstance(self.policy, BSP) else None)
        lowest = self.lowest.get(process, 0)
        fine = bound is None or lowest >= iteration - bound
        self.expect(fine, "bound", f"worker {name(process)} at {iteration}, a member at {lowest} (s={bound})")


class Run:
    """One random run: the machines, what is in flight, and the authority on membership."""

    def __init__(
        self, policy: CentralPolicy, header: Header, iterations: int, patience: int, make: MachineFactory
    ) -> None:
        self.story = Story(header)
        self.members = header.members
        self.iterations = iterations
        self.make = make
        self.ledgers = [Ledger(policy, self.story, patience) for _ in range(self.members.servers)]
        self.random = Random(header.seed)
        self.now = 0.0
        self.order = count()
        self.flight: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.links: defaultdict[Link, deque[Message]] = defaultdict(deque)
        self.slowness = self.random.choice((0.1, 0.5, 2.0))
        self.pace: defaultdict[Any, float] = defaultdict(lambda: self.random.choice((0.3, 1.0, 1.0, 8.0)))
        self.shards = [self.start("server", shard) for shard in range(self.members.servers)]
        self.processes: dict[Process, Machine] = {}
        self.expelled: set[Process] = set()
        """Those that were given up but go on."""
        self.computed: dict[Process, int] = {}
        self.incarnations: dict[int, int] = {}
        self.view = View(0, ())
        self.faults = False

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
            left = [handle for handle, fate in ledger.fate.items() if fate != "consumed"]
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
                self.step(Node("server", shard), PullArrived(self.now, pull))
            case Parameters() as parameters:
                self.step(Node("worker", process[0]), ParametersArrived(self.now, parameters), process)

    def push(self, shard: int, push: Push) -> None:
        bad = self.faults and self.random.random() < 0.03
        event = PushRejected(self.now, push, "not finite") if bad else PushArrived(self.now, push)
        self.step(Node("server", shard), event)

    def step(self, node: Node, event: Event, process: Process = (0, 0)) -> None:
        """Hand an event to a machine, judge what it orders, carry it out. The dead hear nothing."""
        machine = self.shards[node.rank] if node.role == "server" else self.processes.get(process)
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
                    self.send((asker(parameters), node.rank, False), parameters)
                case Send(to, message):
                    self.send((process, to.rank, True), message)
                case Compute():
                    self.compute(process, action)

    def compute(self, process: Process, compute: Compute) -> None:
        new = compute.iteration > self.computed.get(process, -1)
        self.story.expect(new, "answer", f"worker {name(process)} is to {in_words(compute)} again")
        self.computed[process] = compute.iteration
        for ledger in self.ledgers:
            ledger.judge_bound(process, compute.iteration)
        if compute.iteration < self.iterations:
            duration = self.pace[process] * self.random.uniform(0.5, 1.5)
            sizes = self.story.trace.header.slice_bytes
            ready = GradientReady(self.now + duration, compute.iteration, compute.attempt, sizes)
            self.later(duration, self.step, Node("worker", process[0]), ready, process)
        else:
            del self.processes[process]
            self.lose(process)

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
            for shard in range(self.members.servers):
                sent = self.links[victim, shard, True]
                for _ in range(self.random.randint(0, len(sent))):
                    sent.pop()
        self.later(self.delay(), self.lose, victim)
        if len(victims) == 1 or self.random.random() < 0.6:
            self.later(self.delay(), self.join, victim[0])

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
        receivers += [(Node("worker", process[0]), process) for process in self.processes]
        for node, process in receivers:
            delay = self.delay() * self.random.choice((1, 4))
            self.later(delay, self.step, node, ViewChanged(self.now + delay, self.view), process)


def play(
    policy: CentralPolicy,
    *,
    workers: int,
    servers: int = 3,
    iterations: int = 10,
    seed: int,
    faults: bool = True,
    patience: int = 0,
    machine_factory: MachineFactory | None = None,
) -> Story:
    """Play one random run to its end. Raises `PolicyBroken` if the policy broke a rule."""
    members = Members(workers, servers)
    policy.validate(members)
    header = Header("testing", str(policy), members, seed, (8,) * servers)
    return Run(policy, header, iterations, patience, machine_factory or policy.machine).play(faults)


def author(handle: Handle) -> Process:
    return handle.source, handle.incarnation


def asker(message: Pull | Parameters) -> Process:
    return message.worker, message.incarnation


def name(process: Process) -> str:
    """'1' for the first life of worker 1, '1.2' for its third."""
    rank, incarnation = process
    return f"{rank}.{incarnation}" if incarnation else f"{rank}"


def in_words(thing: Event | Action | Message) -> str:
    """One line for a person, the same in stories and in the test scripts."""
    match thing:
        case ViewChanged(view=view):
            return f"view {view.number} of workers {', '.join(map(name, view.members)) or 'none'}"
        case PushArrived(push=push):
            return in_words(push)
        case PushRejected(push=push, reason=reason):
            return f"{in_words(push)} rejected, {reason}"
        case PullArrived(pull=pull):
            return in_words(pull)
        case ParametersArrived(parameters=parameters):
            return f"answer of shard {parameters.shard} to {in_words(parameters)}"
        case GradientReady(iteration=iteration):
            return f"gradient of iteration {iteration} ready"
        case Push(handle):
            return f"push of iteration {handle.iteration} by worker {name(author(handle))}"
        case Pull(iteration=iteration):
            return f"pull of iteration {iteration} by worker {name(asker(thing))}"
        case Parameters(iteration=iteration, version=version, dropped=dropped):
            after = ", your push was dropped" if dropped else ""
            return f"worker {name(asker(thing))}: compute {iteration} on version {version}{after}"
        case Compute(iteration):
            return f"compute iteration {iteration}"
        case Send(to, message):
            return f"send {to} the {in_words(message)}"
        case Apply(handles, weight, version):
            which = " and ".join(f"{handle.iteration} of worker {name(author(handle))}" for handle in handles)
            return f"apply iteration {which} at weight {weight:.3g}, making version {version}"
        case Drop(handle, reason):
            return f"drop the {in_words(Push(handle))}: {reason}"
        case Answer(parameters, reason, released_by):
            by = f", by worker {released_by}" if released_by >= 0 else ""
            return f"answer {in_words(parameters)}{f' (was parked: {reason}{by})' if reason else ''}"
        case Park(pull, reason):
            return f"park the {in_words(pull)}: {reason}"
        case _:
            assert_never(thing)
