"""The scripts in `scripts/`: commands to one shard or to a small cluster, and what the machines ordered, in words.

After etcd raft's data-driven tests. A script is made of blocks: commands, a line `----`, and the expected
output up to the next empty line. `#` begins a remark. To one shard:

    shard ssp:staleness=1 workers=3      a fresh shard; its checks are on
    view 2 0 1.1                         view number 2: worker 0, and worker 1 in incarnation 1
    lose 1 | join 1                      the next view, without worker 1 or with its next incarnation
    push 1.1 3 | pull 1.1 4              worker 1 (incarnation 1) pushed iteration 3, asks for iteration 4
    push 1.1 3 of 8                      the same with a gradient that stands for 8 samples
    reject 0 3 not finite                a slice arrived that must not be applied
    where                                V, version, next, and what is held or parked

To a cluster, whose wire delivers only what it is told to:

    cluster backup:extra=1 workers=3 servers=2
    deliver                              all that is in flight, first sent first, and what that leads to
    deliver worker 0 -> server 1         all that is on this link
    compute 0                            worker 0 has computed its gradient
    kill 1                               worker 1 is gone; what it sent is still on the way
    lose 1 | join 1                      a new view is on the way to everybody
    where                                of every shard

With PACELINE_REWRITE=1 in the environment the expected output is written anew: read the difference before you
commit it, every line is a promise.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.core.actions import Action, Answer, Send
from paceline.core.events import (
    Event,
    GradientReady,
    ParametersArrived,
    PullArrived,
    PushArrived,
    PushRejected,
    ViewChanged,
)
from paceline.core.formatting import name, to_text
from paceline.core.machine import Machine
from paceline.core.messages import Handle, Members, Node, Parameters, Process, Pull, Push, View
from paceline.core.shard import Shard
from paceline.policies import parse

SCRIPTS = sorted(Path(__file__).with_name("scripts").glob("*.txt"))
REWRITE = "PACELINE_REWRITE" in os.environ


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    text = path.read_text()
    stage = Stage()
    played = "".join(play_block(stage, commands) for commands in blocks(text))
    if REWRITE:
        path.write_text(played)
    else:
        assert played == text


def test_there_are_scripts() -> None:
    assert {"bsp", "asp", "ssp", "backup", "loss", "join", "ghost", "duplicate", "disagree"} <= {
        path.stem for path in SCRIPTS
    }


def blocks(text: str) -> Iterator[list[str]]:
    """The lines of each block above its `----`, remarks and empty lines in front included."""
    lines = iter(text.splitlines())
    commands: list[str] = []
    for line in lines:
        if line != "----":
            commands.append(line)
            continue
        yield commands
        commands = []
        for expected in lines:
            if not expected:
                break
    assert not commands, f"no ---- after {commands}"


def play_block(stage: Stage, commands: list[str]) -> str:
    output: list[str] = []
    for line in commands:
        if line and not line.startswith("#"):
            output += stage.obey(line)
    return "\n".join([*commands, "----", *(output or ["nothing"])]) + "\n\n"


def process_of(word: str) -> Process:
    rank, _, incarnation = word.partition(".")
    return int(rank), int(incarnation or 0)


class Stage:
    """What the commands act on: one shard, or a cluster with a wire."""

    def __init__(self) -> None:
        self.machines: dict[Node, Machine] = {}
        self.lives: dict[Node, int] = {}
        """The incarnation of each worker that runs."""
        self.view = View(0, ())
        self.newest: dict[int, int] = {}
        self.is_cluster = False
        self.versions: dict[Process, int] = {}
        self.flight: deque[tuple[Node, Process, Node, Event]] = deque()
        """Sender, the life of the worker concerned, receiver, what it is about to learn."""
        self.make: Callable[[Node], Machine] = lambda node: Machine()

    def obey(self, line: str) -> list[str]:
        command, *words = line.split()
        orders: dict[str, Callable[..., list[str]]] = {
            "shard": self.start_shard,
            "cluster": self.start_cluster,
            "view": self.tell_view,
            "lose": self.lose,
            "join": self.join,
            "push": self.push,
            "reject": self.reject,
            "pull": self.pull,
            "compute": self.compute,
            "kill": self.kill,
            "deliver": self.deliver,
            "where": self.where,
        }
        return orders[command](*words)

    def start_shard(self, policy: str, workers: str) -> list[str]:
        self.__init__()  # type: ignore[misc]
        self.set_up(policy, Members(int(workers.removeprefix("workers=")), 1))
        return []

    def start_cluster(self, policy: str, workers: str, servers: str) -> list[str]:
        self.__init__()  # type: ignore[misc]
        members = Members(int(workers.removeprefix("workers=")), int(servers.removeprefix("servers=")))
        self.set_up(policy, members)
        self.is_cluster = True
        for rank in range(members.workers):
            self.start_worker(rank)
        return self.announce(dict.fromkeys(range(members.workers), 0))

    def set_up(self, policy: str, members: Members) -> None:
        self.make = lambda node: parse(policy).machine(*node, members, 0)
        for shard in range(members.servers):
            self.start(Node("server", shard))

    def start(self, node: Node) -> None:
        self.machines[node] = self.make(node)
        self.machines[node].checks = True

    def start_worker(self, rank: int) -> None:
        self.newest[rank] = self.newest.get(rank, -1) + 1
        self.lives[Node("worker", rank)] = self.newest[rank]
        self.start(Node("worker", rank))

    def tell_view(self, number: str, *members: str) -> list[str]:
        """A view with any number, to the shard: the authority's views may overtake each other."""
        view = View(int(number), tuple(process_of(word) for word in members))
        if view.number > self.view.number:
            self.view = view
            self.newest |= dict(view.members)
        return self.step(Node("server", 0), ViewChanged(0.0, view))

    def lose(self, rank: str) -> list[str]:
        return self.announce({member: life for member, life in self.view.members if member != int(rank)})

    def join(self, rank: str) -> list[str]:
        if self.is_cluster:
            self.start_worker(int(rank))
        else:
            self.newest[int(rank)] = self.newest.get(int(rank), -1) + 1
        return self.announce(dict(self.view.members) | {int(rank): self.newest[int(rank)]})

    def announce(self, members: dict[int, int]) -> list[str]:
        self.view = View(self.view.number + 1, tuple(sorted(members.items())))
        event = ViewChanged(0.0, self.view)
        if not self.is_cluster:
            return self.step(Node("server", 0), event)
        for node in self.machines:
            self.flight.append((Node("driver", 0), (node.rank, self.lives.get(node, 0)), node, event))
        return [f"on the way: {to_text(event)}"]

    def push(self, who: str, iteration: str, of: str = "of", weight: str = "1") -> list[str]:
        assert of == "of"
        return self.step(Node("server", 0), PushArrived(0.0, Push(self.handle(who, iteration, float(weight)))))

    def reject(self, who: str, iteration: str, *why: str) -> list[str]:
        push = Push(self.handle(who, iteration))
        return self.step(Node("server", 0), PushRejected(0.0, push, " ".join(why)))

    def handle(self, who: str, iteration: str, weight: float = 1.0) -> Handle:
        process = process_of(who)
        return Handle(*process, int(iteration), self.versions.get(process, 0), 8, weight)

    def pull(self, who: str, iteration: str) -> list[str]:
        return self.step(Node("server", 0), PullArrived(0.0, Pull(*process_of(who), int(iteration))))

    def compute(self, rank: str) -> list[str]:
        node = Node("worker", int(rank))
        iteration = self.machines[node].iteration  # type: ignore[attr-defined]
        servers = sum(node.role == "server" for node in self.machines)
        return self.step(node, GradientReady(0.0, iteration, 0, (8,) * servers))

    def kill(self, rank: str) -> list[str]:
        del self.machines[Node("worker", int(rank))]
        return []

    def deliver(self, *link: str) -> list[str]:
        output: list[str] = []
        later: deque[tuple[Node, Process, Node, Event]] = deque()
        while self.flight:
            sender, process, receiver, event = self.flight.popleft()
            if link and f"{sender} -> {receiver}" != " ".join(link):
                later.append((sender, process, receiver, event))
            elif receiver in self.machines and self.lives.get(receiver, process[1]) == process[1]:
                output += self.step(receiver, event)
        self.flight = later
        return output

    def where(self) -> list[str]:
        return [where(machine) for machine in self.machines.values() if isinstance(machine, Shard)]

    def step(self, node: Node, event: Event) -> list[str]:
        actions = self.machines[node].handle(event)
        sender = (node.rank, self.lives.get(node, 0))
        for action in actions:
            if isinstance(action, Answer):
                self.remember(action.parameters)
                arrived = ParametersArrived(0.0, action.parameters)
                process = (action.parameters.worker, action.parameters.incarnation)
                if self.is_cluster:
                    self.flight.append((node, process, Node("worker", process[0]), arrived))
            if isinstance(action, Send):
                message = action.message
                sent = PushArrived(0.0, message) if isinstance(message, Push) else PullArrived(0.0, message)
                self.flight.append((node, sender, action.to, sent))
        where = f"{node}: " if self.is_cluster else ""
        return [f"{where}{words}" for words in worth_saying(actions)]

    def remember(self, parameters: Parameters) -> None:
        self.versions[parameters.worker, parameters.incarnation] = parameters.version


def worth_saying(actions: list[Action]) -> Iterator[str]:
    """Of what a worker sends only the pulls: a push goes in front of one, in the same breath."""
    asked: dict[int, list[int]] = {}
    for action in actions:
        if isinstance(action, Send) and isinstance(action.message, Pull):
            asked.setdefault(action.message.iteration, []).append(action.to.rank)
        elif not isinstance(action, Send):
            yield to_text(action)
    pushed = any(isinstance(action, Send) and isinstance(action.message, Push) for action in actions)
    for iteration, shards in asked.items():
        names = f"server{'s' if len(shards) > 1 else ''} {', '.join(map(str, shards))}"
        yield f"{f'push iteration {iteration - 1} to and ' if pushed else ''}pull iteration {iteration} from {names}"


def where(shard: Shard) -> str:
    progress = shard.progress
    standing = ", ".join(f"worker {name((w, shard.incarnations[w]))} at {at}" for w, at in progress.next.items())
    held = [to_text(Push(handle)) for handles in shard.held.values() for handle in handles]
    parked = [
        f"{to_text(pull)} until V={freed}"
        for freed, pulls in sorted(shard.parked.items())
        for pull in pulls
        if shard.waiting.get(pull.worker) == pull
    ]
    parts = [f"shard {shard.rank}: V={progress.V}, version {shard.version}", standing or "nobody"]
    parts += [f"held: {words}" for words in held] + [f"parked: {words}" for words in parked]
    return "; ".join(parts)


def test_an_output_that_differs_is_seen() -> None:
    text = "shard bsp workers=2\nview 1 0 1\npull 0 0\n----\nanswer worker 0: compute 1 on version 0\n\n"
    played = "".join(play_block(Stage(), commands) for commands in blocks(text))
    assert played == text.replace("compute 1", "compute 0")
