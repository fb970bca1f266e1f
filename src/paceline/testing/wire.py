"""The fake wire: machines, what is in flight between them, workers that die and come back. See `paceline.testing`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import sqrt
from random import Random

from paceline.core import events, messages
from paceline.core.actions import AbortCompute, Answer, Apply, Compute, Measure, Send, SetTimer
from paceline.core.formatting import name, requester, to_text
from paceline.core.machine import Machine
from paceline.core.messages import Members, Message, Node, Process, Pull, Push, Role, View
from paceline.core.norm_reducer import REDUCER, NormReducer
from paceline.core.policy import CentralPolicy
from paceline.core.scheduler import SCHEDULER
from paceline.core.shard import Shard
from paceline.core.trace import Header
from paceline.core.worker import Worker
from paceline.testing.fake_wire import FakeWire
from paceline.testing.ledger import Ledger
from paceline.testing.story import Story

Link = tuple[Process, int, bool]
"""A link joins a process and a shard in one direction (True: to the shard)."""

SCHEDULING = -1
"""The scheduler's place in a link. A shard that reports to it does so as the process (SCHEDULING, shard)."""

REDUCING = -2
"""The place of the reducer of norms in a link, used like `SCHEDULING`."""

MachineFactory = Callable[[Role, int, Members, int], Machine]
"""Makes machines like `policy.machine`; a substitute breaks a rule on purpose."""


class Run(FakeWire[Link]):
    """One random run: the machines, what is in flight, and the authority on membership."""

    def __init__(
        self, policy: CentralPolicy, header: Header, iterations: int, patience: int, make: MachineFactory
    ) -> None:
        super().__init__(header)
        self.policy = policy
        self.members = header.members
        self.iterations = iterations
        self.make = make
        self.ledgers = [Ledger(policy, shard, self.story, patience) for shard in range(self.members.servers)]
        self.reducer: Machine = NormReducer(self.members.servers)
        self.reducer.checks = True
        self.parts: defaultdict[int, dict[int, float]] = defaultdict(dict)
        """iteration -> shard -> the squared norm of its slice of the mean, as it was measured."""
        self.norms: list[tuple[int, float]] = []
        """(iteration, norm) of each step that was clipped."""
        self.shards = [self.start("server", shard) for shard in range(self.members.servers)]
        self.scheduler = self.start("scheduler", 0) if policy.has_scheduler else None
        self.processes: dict[Process, Machine] = {}
        self.expelled: set[Process] = set()
        """Processes that were given up but go on."""
        self.computed: dict[Process, tuple[int, int]] = {}
        """The last (iteration, attempt) each process was ordered to compute."""
        self.running: dict[Process, Compute] = {}
        self.incarnations: dict[int, int] = {}
        self.view = View(0, ())
        self.finished: set[int] = set()
        """The ranks that have done their iterations."""
        self.said: dict[tuple[Process, int], list[Push | Pull]] = {}
        """What each process sent last to each shard, to repeat it to a restarted one."""
        self.shard_incarnations = [0] * self.members.servers
        self.down: set[tuple[Process, int]] = set()
        """Links to a restarted shard that are not open again: messages on them are lost meanwhile."""
        self.luck = Random(f"servers {header.seed}")
        """What happens to servers is drawn apart, so that the rest of a run is the same with and without."""

    def start(self, role: Role, rank: int) -> Machine:
        machine = self.make(role, rank, self.members, self.story.trace.header.seed)
        machine.checks = True
        if isinstance(machine, Shard):
            machine.clips_mean = self.story.trace.header.clips_mean
        return machine

    def play(self, faults: bool) -> Story:
        self.faults = faults
        self.join(*range(self.members.workers))
        usual = (1 + 3 * self.members.servers) * self.members.workers * self.iterations
        kills, joins = self.random.randint(0, 4) * faults, self.random.randint(0, 1) * faults
        troubles = [(self.random.randrange(usual), trouble) for trouble in [self.kill] * kills + [self.join] * joins]
        strikes = self.luck.choice((0, 0, 1, 3)) * faults
        troubles += [(self.luck.randrange(usual), self.strike) for _ in range(strikes)]
        self.run(troubles, 100 * usual)
        self.judge_end()
        return self.story

    def judge_end(self) -> None:
        stuck = [name(process) for process in self.processes if process not in self.expelled]
        asked = [to_text(pull) for ledger in self.ledgers for pull in ledger.asked.values()]
        self.story.expect(not stuck, "hang", f"nothing is in flight, workers {stuck} are not done: {asked}")
        for ledger in self.ledgers:
            left = ledger.left()
            self.story.expect(not left, "handles", f"never applied nor dropped: {left}")
        for iteration, norm in self.norms:
            parts = self.parts[iteration]
            true = sqrt(sum(parts.values()))
            self.story.expect(norm == true, "norm", f"iteration {iteration} stepped with norm {norm}, not {parts}")

    def deliver(self, link: Link) -> None:
        if not self.links[link]:
            return
        message = self.links[link].popleft()
        node, process = self.receiver(link, message)
        self.arrive(message, node, process)
        if (
            isinstance(message, Push | Pull | messages.Notify | messages.Resync)
            and self.faults
            and self.random.random() < 0.05
        ):
            self.later(self.delay() * 5, self.arrive, message, node, process)

    def receiver(self, link: Link, message: Message) -> tuple[Node, Process]:
        process, shard, _ = link
        match message:
            case messages.Parameters() | messages.Release() | messages.Resync():
                return Node("worker", process[0]), process
            case messages.Plan() | messages.MeanNorm():
                return Node("server", process[1]), (0, 0)
            case messages.SliceNorm():
                return REDUCER, (0, 0)
        return SCHEDULER if shard == SCHEDULING or isinstance(message, messages.Rise) else Node("server", shard), (0, 0)

    def arrive(self, message: Message, node: Node, process: Process = (0, 0)) -> None:
        """Tells a machine of a message; of a push perhaps that it was rejected, or how significant it is."""
        event = events.arrival_of(message, self.now)
        if isinstance(message, Push):
            bad = self.faults and self.random.random() < 0.03
            machine = self.shards[node.rank]
            wanted = isinstance(machine, Shard) and machine.gate.wants_significance
            significance = self.random.expovariate(2.0) if wanted else None
            rejected = events.PushRejected(self.now, message, "not finite")
            event = rejected if bad else events.PushArrived(self.now, message, significance)
        self.step(node, event, process)

    def step(self, node: Node, event: events.Event, process: Process = (0, 0)) -> None:
        """Hands an event to a machine, judges what it orders, and does it. Dead processes receive nothing."""
        machine = self.machine_at(node, process)
        if machine is None:
            return
        actions = self.tell(machine, node, process[1], event, recorded=node != REDUCER)
        if node.role == "server":
            self.ledgers[node.rank].note(event)
            self.ledgers[node.rank].judge(actions)
        for action in actions:
            self.story.counts[type(action).__name__] += 1
            match action:
                case Answer(parameters):
                    if (requester(parameters), node.rank) in self.down:
                        continue  # a new incarnation answers only those it has heard: they will ask again
                    self.send((requester(parameters), node.rank, False), parameters)
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
                case Measure():
                    self.measure(node.rank, action)
                case Apply(handles=handles, norm=float(norm)):
                    self.norms.append((handles[0].iteration, norm))
                case SetTimer(timer, after_s):
                    due = self.now + after_s
                    self.later(after_s, self.step, node, events.TimerFired(due, timer), process)

    def measure(self, shard: int, measure: Measure) -> None:
        """Reports a norm that follows from the gradients: a whole number, so that sums are exact."""
        squared = float(sum((1 + handle.source) << shard for handle in measure.handles))
        self.parts[measure.iteration][shard] = squared
        self.send(((REDUCING, shard), REDUCING, True), messages.SliceNorm(shard, measure.iteration, squared))

    def machine_at(self, node: Node, process: Process) -> Machine | None:
        if node.role == "server":
            return self.shards[node.rank]
        if node == REDUCER:
            return self.reducer
        return self.scheduler if node == SCHEDULER else self.processes.get(process)

    def link(self, sender: Node, process: Process, to: Node, message: Message) -> Link:
        """Returns the link a message takes. What a scheduler lets pass is judged when it leaves."""
        if isinstance(message, messages.Release):
            i, V = message.iteration - 1, min(ledger.V for ledger in self.ledgers)
            together = self.policy.in_force(0, V).may_pull(i, V)
            self.story.expect(together, "together", f"{to_text(message)}, a shard is at V={V}")
            return requester(message), SCHEDULING, False
        if isinstance(message, messages.Resync):
            return requester(message), SCHEDULING, False
        if isinstance(message, messages.Plan):
            return (SCHEDULING, to.rank), SCHEDULING, False
        if isinstance(message, messages.SliceNorm):
            return (REDUCING, message.shard), REDUCING, True
        if isinstance(message, messages.MeanNorm):
            return (REDUCING, to.rank), REDUCING, False
        if sender.role == "server":
            process = (SCHEDULING, sender.rank)
        return process, to.rank if to.role == "server" else SCHEDULING, True

    def compute(self, process: Process, compute: Compute) -> None:
        iteration, attempts = self.computed.get(process, (-1, 0))
        new = compute.iteration > iteration and compute.attempt == 0
        again = (compute.iteration, compute.attempt) == (iteration, attempts + 1) and process not in self.running
        self.story.expect(new or again, "answer", f"worker {name(process)} is to {to_text(compute)} again")
        self.computed[process] = (compute.iteration, compute.attempt)
        for ledger in self.ledgers:
            ledger.judge_bound(process, compute.iteration)
        if compute.iteration < self.iterations:
            duration = self.pace[process] * self.random.uniform(0.5, 1.5)
            sizes = self.story.trace.header.slice_bytes
            ready = events.GradientReady(self.now + duration, compute.iteration, compute.attempt, sizes, self.weigh())
            self.running[process] = compute
            self.later(duration, self.finish, process, compute, ready)
        else:
            del self.processes[process]
            self.lose(process, finished=True)

    def finish(self, process: Process, compute: Compute, ready: events.GradientReady) -> None:
        if self.running.get(process) == compute:
            del self.running[process]
            self.step(Node("worker", process[0]), ready, process)

    def abort(self, process: Process, abort: AbortCompute) -> None:
        """Aborts a computation in time, or finishes it, which beats the abort."""
        runs = self.running.get(process) == Compute(abort.iteration, abort.attempt)
        self.story.expect(runs, "abort", f"worker {name(process)} is to {to_text(abort)}, which it does not compute")
        self.story.expect(abort.attempt == 0, "abort", f"worker {name(process)} is to {to_text(abort)}")
        if self.random.random() < 0.7:
            del self.running[process]
            delay = self.delay()
            aborted = events.ComputeAborted(self.now + delay, abort.iteration, abort.attempt)
            self.later(delay, self.step, Node("worker", process[0]), aborted, process)

    def kill(self) -> None:
        """Kills a worker, or only has it taken for dead."""
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
                self.cut((victim, shard, True))
        self.later(self.delay(), self.lose, victim)
        if len(victims) == 1 or self.random.random() < 0.6:
            self.later(self.delay(), self.join, victim[0])

    def remember(self, process: Process, shard: int, message: Push | Pull) -> None:
        before = self.said.get((process, shard), [])
        follows = isinstance(message, Pull) and before and isinstance(before[-1], Push)
        self.said[process, shard] = [*before, message] if follows else [message]

    def strike(self) -> None:
        """Kills a durable server: its machine comes back as it was, and all that was under way is lost."""
        shard = self.luck.randrange(self.members.servers)
        self.shard_incarnations[shard] += 1
        self.story.counts["strikes"] += 1
        if self.story.trace.header.clips_mean:
            self.links[(REDUCING, shard), REDUCING, True].clear()
            self.links[(REDUCING, shard), REDUCING, False].clear()
            self.later(self.luck.expovariate(1 / self.slowness), self.speak_again, shard)
        for process in list(self.processes):
            self.links[process, shard, True].clear()
            self.links[process, shard, False].clear()
            self.down.add((process, shard))
            delay, incarnation = self.luck.expovariate(1 / self.slowness), self.shard_incarnations[shard]
            self.later(delay, self.meet_again, process, shard, incarnation)

    def speak_again(self, shard: int) -> None:
        """Repeats a restarted server's reports to the reducer, which may have been lost."""
        machine = self.shards[shard]
        for action in machine.reports_to_repeat() if isinstance(machine, Shard) else ():
            if isinstance(action, Measure):
                self.measure(shard, action)
            elif isinstance(action, Send):
                self.send(self.link(Node("server", shard), (0, 0), action.to, action.message), action.message)

    def meet_again(self, process: Process, shard: int, incarnation: int) -> None:
        """Connects a process to a restarted server. If it waits for an answer it sends again what it sent last."""
        if incarnation != self.shard_incarnations[shard]:
            return
        self.down.discard((process, shard))
        machine = self.processes.get(process)
        if not isinstance(machine, Worker) or not (shard in machine.waiting or machine.pausing):
            return
        for message in self.said.get((process, shard), ()):
            node = Node("server", shard)
            if isinstance(message, Push):
                self.arrive(message, node)
            else:
                self.step(node, events.PullRepeated(self.now, message))

    def lose(self, process: Process, finished: bool = False) -> None:
        if process in self.view.members:
            if finished:
                self.finished.add(process[0])
            self.announce({rank: incarnation for rank, incarnation in self.view.members if rank != process[0]})

    def join(self, *ranks: int) -> None:
        """Starts these ranks, each under its next incarnation; without any, a new rank."""
        started = {rank: self.incarnations.get(rank, -1) + 1 for rank in ranks or [len(self.incarnations)]}
        self.story.counts["joins"] += len(started)
        self.incarnations |= started
        self.finished.difference_update(started)
        for process in started.items():
            self.processes[process] = self.start("worker", process[0])
        self.announce(dict(self.view.members) | started)

    def announce(self, members: dict[int, int]) -> None:
        self.view = View(self.view.number + 1, tuple(sorted(members.items())), tuple(sorted(self.finished)))
        receivers = [(Node("server", shard), (0, 0)) for shard in range(self.members.servers)]
        receivers += [(SCHEDULER, (0, 0))] if self.scheduler is not None else []
        receivers += [(Node("worker", process[0]), process) for process in self.processes]
        for node, process in receivers:
            delay = self.delay() * self.random.choice((1, 4))
            self.later(delay, self.step, node, events.ViewChanged(self.now + delay, self.view), process)
