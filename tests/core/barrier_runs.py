"""Random runs in which scripts call `paceline.barrier()`: the driver, and those who wait there, as they are live."""

from __future__ import annotations

from heapq import heappop
from random import Random
from typing import Any

from paceline.core.actions import Action, Compute
from paceline.core.events import GradientReady, GradientRejected, PushRejected
from paceline.core.hop_peer import HopPeer
from paceline.core.messages import Members, Message, Node, Push, Resync
from paceline.core.policy import CentralPolicy, PeerPolicy
from paceline.core.shard import Shard
from paceline.core.trace import Header
from paceline.core.worker_barrier import Process, WorkerBarrier, awaited
from paceline.testing.peers import PeerRun
from paceline.testing.wire import Run


class Script:
    """What a worker's script does: so many steps, with barriers before some of them."""

    def __init__(self, rank: int, seed: int, steps: int, alike: bool) -> None:
        chance = Random(f"{seed} {0 if alike else rank}")
        self.steps = steps if alike or chance.random() < 0.7 else chance.randint(1, steps)
        self.barriers = {step for step in range(self.steps) if chance.random() < 0.3}
        self.done = -1
        """Steps it has done; -1: it has not begun."""


class InBarriers:
    """Who waits, and what each was ordered to compute."""

    def __init__(self, seed: int, steps: int, alike: bool) -> None:
        self.scripts: dict[Process, Script] = {}
        self.make = lambda process: Script(process[0], seed, steps, alike)
        self.barrier = WorkerBarrier()
        self.ordered: dict[Process, Compute] = {}
        self.following: dict[Process, int] = {}
        """Who has been told to push without a gradient, and the iteration."""
        self.entered = 0

    def script(self, process: Process) -> Script:
        if process not in self.scripts:
            self.scripts[process] = self.make(process)
        return self.scripts[process]

    def enters(self, process: Process, compute: Compute) -> bool:
        """The script of this process has its parameters: whether it waits now, or still."""
        script = self.script(process)
        self.ordered[process] = compute
        if self.following.pop(process, None) is not None and process in self.barrier.waiting:
            return True
        script.done += 1
        if script.done not in script.barriers:
            return False
        self.entered += 1
        self.barrier.enter(process)
        return True


class BarrierRun(Run):
    """Workers and servers. Scripts end after their steps, however far others are."""

    def __init__(self, policy: CentralPolicy, workers: int, servers: int, steps: int, seed: int, alike: bool) -> None:
        header = Header("testing", str(policy), Members(workers, servers), seed, (8,) * servers)
        super().__init__(policy, header, 10**9, 10**9, policy.machine)
        self.usual = 100 * workers * servers * steps
        self.inside = InBarriers(seed, steps, alike)
        self.empty: set[tuple[Process, int]] = set()
        """Pushes without a gradient."""

    def play(self, faults: bool) -> Any:
        self.join(*range(self.members.workers))
        kills = [self.random.randrange(self.usual // 10) for _ in range(2 * faults)]
        done = 0
        while self.flight and done < 10 * self.usual:
            if done in kills and len(self.processes) > 1:
                self.kill_for_good()
            self.now, _, deliver, what = heappop(self.flight)
            deliver(*what)
            self.look()
            done += 1
        self.story.expect(not self.flight, "hang", "the run does not come to an end")
        self.judge_end()
        return self.story

    def kill_for_good(self) -> None:
        victim = self.random.choice(sorted(self.processes))
        del self.processes[victim]
        self.later(self.delay(), self.lose, victim)

    def compute(self, process: Process, compute: Compute) -> None:
        for ledger in self.ledgers:
            ledger.judge_bound(process, compute.iteration)
        if self.inside.enters(process, compute):
            return
        if self.inside.script(process).done >= self.inside.script(process).steps:
            del self.processes[process]
            self.lose(process, finished=True)
        else:
            self.go_on(process)

    def go_on(self, process: Process) -> None:
        compute = self.inside.ordered[process]
        self.running[process] = compute
        sizes = self.story.trace.header.slice_bytes
        duration = self.pace[process] * self.random.uniform(0.5, 1.5)
        ready = GradientReady(self.now + duration, compute.iteration, compute.attempt, sizes)
        self.later(duration, self.finish, process, compute, ready)

    def arrive(self, message: Message, node: Node, process: Process = (0, 0)) -> None:
        """Only a closure that runs is interrupted; who waits in a barrier pushes no gradient."""
        handle = message.handle if isinstance(message, Push) else None
        if isinstance(message, Resync) and process not in self.running:
            return
        if handle is not None and ((handle.source, handle.incarnation), handle.iteration) in self.empty:
            self.step(node, PushRejected(self.now, message, "waits in a barrier"))
            return
        super().arrive(message, node, process)

    def look(self) -> None:
        """The driver looks, as it does in every turn."""
        inside = self.inside
        for process in inside.barrier.open(self.processes):
            if process not in inside.following:  # else it goes on when it has its parameters
                self.go_on(process)
            else:
                inside.script(process).done -= 1
        absent = {rank: (rank, life) for rank, life in inside.barrier.waiting}
        for shard in self.shards:
            assert isinstance(shard, Shard)
            for rank, iteration in awaited(shard, absent).items():
                process = absent[rank]
                if process not in inside.following and inside.ordered[process].iteration <= iteration:
                    self.story.counts["followed"] += 1
                    inside.following[process] = iteration
                    self.later(self.delay(), self.follow, process)

    def follow(self, process: Process) -> None:
        if process in self.processes:
            compute = self.inside.ordered[process]
            self.empty.add((process, compute.iteration))
            sizes = self.story.trace.header.slice_bytes
            ready = GradientReady(self.now, compute.iteration, compute.attempt, sizes)
            self.step(Node("worker", process[0]), ready, process)


class PeerBarrierRun(PeerRun):
    """Peers. Scripts end at an iteration, whatever they have done until then."""

    def __init__(self, policy: PeerPolicy, peers: int, iterations: int, seed: int, alike: bool) -> None:
        members = Members(peers, 0)
        header = Header("testing", str(policy), members, seed, (8,))
        super().__init__(
            policy, header, iterations, lambda rank, members, seed: policy.machine("peer", rank, members, seed),
            frozenset(),
        )  # fmt: skip
        self.inside = InBarriers(seed, iterations, alike)
        self.ended: set[Process] = set()

    def carry_out(self, process: Process, action: Action) -> None:
        if isinstance(action, Compute):
            if action.iteration >= self.iterations:
                self.ended.add(process)
                self.inside.barrier.waiting.discard(process)
            elif not self.inside.enters(process, action):
                self.go_on(process)
        else:
            super().carry_out(process, action)

    def go_on(self, process: Process) -> None:
        super().carry_out(process, self.inside.ordered[process])

    def step(self, process: Process, event: Any) -> None:
        super().step(process, event)
        inside = self.inside
        for each in inside.barrier.open(self.machines.keys() - self.ended):
            if each not in inside.following:
                self.go_on(each)
            else:
                inside.script(each).done -= 1
        for each in inside.barrier.waiting - inside.following.keys():
            machine = self.machines[each]
            if isinstance(machine, HopPeer) and machine.is_overtaken:
                self.story.counts["followed"] += 1
                inside.following[each] = machine.iteration
                self.later(self.delay() * self.pace[each], self.follow, each)

    def follow(self, process: Process) -> None:
        machine = self.machines.get(process)
        if machine is not None:
            compute = self.inside.ordered[process]
            furthest = max(self.judge.iteration[other] for other in self.machines if other != process)
            assert self.faults or furthest >= compute.iteration, "it runs ahead of all others"
            rejected = GradientRejected(self.now, compute.iteration, compute.attempt, (8,), "waits in a barrier")
            self.step(process, rejected)
