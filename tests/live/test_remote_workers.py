"""Workers and servers on different hosts: the same runs, over TCP.

Here all are on one host, and workers are made to believe that they are not. What really are several hosts (namespaces)
is in tests of their own.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import msgspec
import pytest
import torch

import paceline
from paceline import policies, session, workloads
from paceline.cluster import Resize, load
from paceline.core.events import Restored
from paceline.core.messages import Handle, Members, Parameters, Pull, Push
from paceline.function_workers import function_starter
from paceline.run import Run
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.messaging.unix_sockets import Link, Listener
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.configuration import Endpoint, MultihostOptions
from paceline.runtime.live.protocol.envelope import wrap
from paceline.runtime.live.protocol.records import DurabilityOptions
from paceline.runtime.live.server.remote_workers import RemoteWorkers
from paceline.runtime.live.storage import endpoints
from paceline.runtime.live.storage.process_keys import find_keys
from paceline.runtime.live.worker import gathered_gradient
from paceline.runtime.live.worker.gathered_gradient import GatheredGradient
from paceline.runtime.live.worker.local_server_link import LocalServerLink
from paceline.runtime.live.worker.outgoing_frames import RemotePayload
from paceline.runtime.live.worker.remote_server_link import RemoteServerLink
from paceline.runtime.live.worker.server_connections import ServerConnections
from paceline.runtime.live.worker.worker import LiveWorker
from paceline.runtime.live.worker.worker_executor import WorkerExecutor
from paceline.tensors import optimizers, wire_precision
from paceline.workload_training import train
from tests.live.meanwhile import meanwhile
from tests.reference import largest_difference, train_alone

LOCAL = MultihostOptions("127.0.0.1", "", (0, 0))
OPEN = msgspec.structs.replace(LOCAL, keys=False)
ALL = frozenset(range(16))
MOMENTUM = "sgd:lr=0.05,momentum=0.9"


def far(work: Callable[[], object], ranks: frozenset[int] = ALL) -> Callable[[], None]:
    """The same work, by workers of which these cannot reach a server through shared memory."""

    def run() -> None:
        if session.init().rank in ranks:
            endpoints.connect = lambda *where: None
        work()

    return run


def digits(iterations: int, optimizer: str = "sgd:lr=0.1", workload: str = "digits-mlp") -> Callable[[], None]:
    return partial(train, workloads.load(workload), optimizers.parse(optimizer), 32, iterations, 0)


def driver_of(work: Callable[[], object], policy: str = "bsp", multihost: MultihostOptions = LOCAL, **more) -> Driver:
    given = {"cluster": load("steady:compute_s=0"), "care": FaultPolicy(timeout_s=60), **more}
    members = given.pop("members", Members(3, 2))
    say = given.pop("say", lambda line: None)
    return Driver(
        RunPlan(members, function_starter(work), policies.parse(policy), multihost=multihost, **given), say=say
    )


def live(work: Callable[[], object], policy: str = "bsp", multihost: MultihostOptions = LOCAL, **more) -> Run:
    run = driver_of(work, policy, multihost, **more).run()
    assert run.failures == []
    assert run.replay() == []
    return run


def my_links() -> list[RemoteServerLink]:
    """In a worker: its links to servers on other hosts."""
    worker = session.init().live
    assert worker is not None
    return [link for link in worker.executor.connections.links if isinstance(link, RemoteServerLink)]


@cache
def alone_for(iterations: int, optimizer: str) -> dict[str, torch.Tensor]:
    return train_alone("digits-mlp", 3, iterations, optimizer, torch.float32)


@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1", MOMENTUM, "adam:lr=0.002"])
def test_bsp_over_tcp_with_keys_equals_single_process(optimizer: str) -> None:
    run = live(far(digits(50, optimizer)))
    assert largest_difference(run.parameters, alone_for(50, optimizer)) < 1e-5


@pytest.mark.parametrize("ranks", [frozenset({1, 2}), frozenset({0})], ids=str)
def test_shared_memory_and_tcp_in_one_run(ranks: frozenset[int]) -> None:
    def work() -> None:
        digits(50, MOMENTUM)()
        assert bool(my_links()) == (session.init().rank in ranks), "each takes the way it is to take"

    run = live(far(work, ranks))
    assert largest_difference(run.parameters, alone_for(50, MOMENTUM)) < 1e-5


def test_without_keys() -> None:
    run = live(far(digits(50)), multihost=OPEN)
    assert largest_difference(run.parameters, alone_for(50, "sgd:lr=0.1")) < 1e-5


@pytest.mark.parametrize(
    "policy",
    [
        "asp",
        "ssp:staleness=3,lazy=true",
        "dssp:low=1,high=4",
        "pssp:staleness=1,significance=true",
        "backup:extra=1",
        "deadline",
        "ssp:staleness=1+backup:extra=1",
        "asp@0,bsp@8",
        "scheduled:base=ssp(staleness=1)",
        "elastic:lookahead=4,predict=median",
        "specsync:abort_time=0.01,abort_rate=0",
        "waiting:delay_s=0.01,base=bsp",
    ],
)
def test_under_every_policy(policy: str) -> None:
    work = far(digits(30, workload="quadratic"), frozenset({0, 2}))
    run = live(work, policy, cluster=load("random-slowdown:factor=6,compute_s=0.004"))
    assert run.metrics.updates >= 20


@pytest.mark.parametrize(
    ("way", "policy"), [("bfloat16", "asp"), ("int8", "bsp"), ("int4", "asp"), ("topk:share=0.1", "bsp")]
)
def test_codes_train_digits(way: str, policy: str) -> None:
    run = live(far(digits(250, MOMENTUM)), policy, msgspec.structs.replace(LOCAL, wire=way))
    assert max(point.accuracy for point in run.history) >= 0.95
    numel = sum(tensor.numel() for tensor in run.parameters.values())
    coded = wire_precision.bytes_per_float(way) * numel
    assert run.metrics.bytes["push"] == pytest.approx(run.metrics.gradients * coded, rel=0.05)
    assert run.metrics.bytes["pull"] < 1.1 * run.metrics.bytes["push"] + 3 * 4 * numel, "the first comes whole"


def test_overlap_over_tcp() -> None:
    def work() -> None:
        world = session.init()
        workload = workloads.load("digits-mlp")
        module = workload.module(0)
        inner = torch.optim.SGD(module.parameters(), lr=0.1)
        opt = paceline.Optimizer(inner, model=module, overlap=world.rank != 1)
        order = paceline.sample_order.SampleOrder(len(workload.train[0]), world.size, 32, 0)
        for step in range(50):
            samples = torch.from_numpy(order.of_worker(world.rank, step))
            opt.zero_grad()
            workload.loss(module(workload.train[0][samples]), workload.train[1][samples]).backward()
            opt.step()

    run = live(far(work))
    assert largest_difference(run.parameters, alone_for(50, "sgd:lr=0.1")) < 1e-5


def test_a_killed_server_comes_back_on_its_port(tmp_path: Path) -> None:
    driver = driver_of(
        far(digits(250), frozenset({0, 1})),
        "ssp:staleness=3",
        cluster=load("steady:compute_s=0.005"),
        checkpointing=CheckpointOptions(tmp_path, every_updates=20),
    )
    before: list[Endpoint] = []

    def kill() -> None:
        checkpointer = driver.parts.checkpointer
        while checkpointer is None or checkpointer.last is None:
            time.sleep(0.001)
        before.append(driver.parts.servers.endpoints[1])
        next(c for c in driver.parts.children.values() if c.role == "server" and c.rank == 1).kill()

    run = meanwhile(driver, kill)
    assert run.failures == []
    assert run.replay() == []
    after = driver.parts.servers.endpoints[1]
    assert (after.incarnation, after.address) == (1, before[0].address)
    assert after.key != before[0].key
    assert [record.node.rank for record in run.trace if isinstance(record.event, Restored)] == [1]
    assert run.history[-1].accuracy > 0.85


def test_a_killed_worker_is_started_again_with_another_key() -> None:
    cluster = load("steady:compute_s=0.005")
    driver = driver_of(far(digits(150)), "ssp:staleness=3", cluster=cluster, care=FaultPolicy(restarts=1, timeout_s=60))

    def kill() -> None:
        next(child for child in driver.parts.workers.live() if child.rank == 1).kill()

    run = meanwhile(driver, kill)
    assert run.failures == []
    pulls = {(r.event.pull.worker, r.event.pull.incarnation) for r in run.trace if hasattr(r.event, "pull")}
    assert (1, 1) in pulls
    assert driver.parts.workers.keys.known == {}


def test_the_optimizers_state_comes_over_tcp(tmp_path: Path) -> None:
    def work() -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(700, 500)
        opt = paceline.Optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(2, 700)).square().mean().backward()
            opt.step()
        if session.init().rank == 0:
            torch.save(opt.state_dict(), tmp_path / "state")

    live(far(work), members=Members(2, 2))
    state = torch.load(tmp_path / "state")["state"]
    assert state[0]["exp_avg"].shape == (500, 700)
    assert state[0]["exp_avg"].abs().sum() > 0
    assert state[0]["step"] == 3


@pytest.mark.parametrize("way", ["float32", "int8"])
def test_another_number_of_servers(way: str) -> None:
    resizes = (Resize(3, at_iteration=10), Resize(1, at_iteration=20))
    multihost = msgspec.structs.replace(LOCAL, wire=way)
    cluster = replace(load("steady:compute_s=0.004"), resizes=resizes)
    run = live(far(digits(50, MOMENTUM), frozenset({0, 2})), multihost=multihost, cluster=cluster)
    assert [(each.before, each.after) for each in run.server_changes] == [(2, 3), (3, 1)]
    assert largest_difference(run.parameters, alone_for(50, MOMENTUM)) < (1e-5 if way == "float32" else 0.05)


def tcp_connections() -> Iterator[socket.socket]:
    """Of this process."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue
        with connection, contextlib.suppress(OSError):
            if connection.family == socket.AF_INET and connection.getpeername():
                yield connection


@pytest.mark.parametrize(
    ("multihost", "way"),
    [(LOCAL, "float32"), (LOCAL, "int8"), (OPEN, "float32")],
    ids=["keys-float32", "keys-int8", "open-float32"],
)
@pytest.mark.parametrize("pause_s", [0.0, 0.02], ids=["before the answer", "with the answer under way"])
def test_a_connection_that_breaks_is_mended_and_nothing_counts_twice(
    multihost: MultihostOptions, way: str, pause_s: float
) -> None:
    """What was said is said again: BSP stays exact, whether the push, or the answer, or neither was lost."""

    def work() -> None:
        said = broken = 0
        say = RemoteServerLink.send

        def say_and_break(self: RemoteServerLink, request: wire.Exchange | wire.Fetch) -> None:
            nonlocal said, broken
            said += 1
            say(self, request)
            if said % 25 == 7 * session.init().rank:
                time.sleep(pause_s)
                for connection in tcp_connections():
                    connection.shutdown(socket.SHUT_RDWR)
                    broken += 1

        RemoteServerLink.send = say_and_break
        digits(25, MOMENTUM)()
        assert broken > 2

    run = live(far(work), multihost=msgspec.structs.replace(multihost, wire=way))
    assert largest_difference(run.parameters, alone_for(25, MOMENTUM)) < (1e-5 if way == "float32" else 0.05)


@pytest.mark.parametrize("multihost", [LOCAL, OPEN], ids=["keys", "open"])
def test_whoever_is_waited_for_all_links_are_looked_after(multihost: MultihostOptions) -> None:
    """Server 0 may wait for a worker that waits for server 1, which waits for what we have said to it."""

    def work() -> None:
        module = torch.nn.Linear(3, 2)
        opt = paceline.Optimizer(torch.optim.SGD(module.parameters(), lr=0.1), model=module)
        connections = session.init().live.executor.connections
        for _ in range(5):
            connections.links[1].reopen()
            until = time.monotonic() + 5.0
            while not connections.links[1].link.is_connected:
                assert time.monotonic() < until
                assert not connections.receive_any({0}, 0.05)
            opt.zero_grad()
            module(torch.ones(1, 3)).sum().backward()
            opt.step()

    live(far(work), multihost=multihost)


def gathering(work: Callable[[], object], times: int) -> Callable[[], None]:
    """The same work, by workers whose gradients go to other hosts from where they are, so often at least."""

    def run() -> None:
        goes: list[bool] = []
        write = GatheredGradient.write

        def write_and_tell(gathered: GatheredGradient, gradients: Sequence[torch.Tensor | None]) -> bool:
            finite = write(gathered, gradients)
            goes.append(bool(gathered.tensors))
            return finite

        gathered_gradient.WORTH_IT, GatheredGradient.write = 0, write_and_tell
        work()
        assert sum(goes) >= times

    return run


def test_gradients_that_leave_from_where_they_are_survive_connections_and_servers_that_change() -> None:
    connect = endpoints.connect

    def work() -> None:
        endpoints.connect = lambda folder, process, shard, endpoint: (
            connect(folder, process, shard, endpoint) if shard == 2 else None
        )
        say, said = RemoteServerLink.send, 0

        def say_and_break(self: RemoteServerLink, request: wire.Exchange | wire.Fetch) -> None:
            nonlocal said
            said += 1
            say(self, request)
            if said % 25 == 7 * session.init().rank:
                for connection in tcp_connections():
                    connection.shutdown(socket.SHUT_RDWR)

        RemoteServerLink.send = say_and_break
        digits(50, MOMENTUM)()
        worker = session.init().live
        assert worker is not None
        assert worker.memory.gathered is not None
        assert not worker.memory.gathered.tensors, "nobody holds the gradient any more"

    resizes = (Resize(3, at_iteration=10), Resize(1, at_iteration=20))
    cluster = replace(load("steady:compute_s=0.004"), resizes=resizes)
    run = live(gathering(work, 30), multihost=OPEN, cluster=cluster)
    assert [(each.before, each.after) for each in run.server_changes] == [(2, 3), (3, 1)]
    assert largest_difference(run.parameters, alone_for(50, MOMENTUM)) < 1e-5


def test_a_gradient_that_was_to_leave_from_where_it_is_is_there_for_a_server_that_comes_near(tmp_path: Path) -> None:
    connect = endpoints.connect

    def work() -> None:
        endpoints.connect = lambda *where: None
        wait_while_held = WorkerExecutor.wait_while_held

        def stand_until_it_is_here(worker: WorkerExecutor) -> None:
            wait_while_held(worker)
            if worker.machine.iteration == 20:
                endpoints.connect = connect
                (tmp_path / "now").touch()
                while not worker.connections.endpoints[0].incarnation:
                    worker.orders.await_driver()

        WorkerExecutor.wait_while_held = stand_until_it_is_here
        digits(40)()

    checkpointing = CheckpointOptions(tmp_path / "kept", durable=DurabilityOptions())
    driver = driver_of(gathering(work, 20), multihost=OPEN, members=Members(1, 1), checkpointing=checkpointing)

    def kill() -> None:
        while not (tmp_path / "now").exists():
            time.sleep(0.001)
        next(child for child in driver.parts.children.values() if child.role == "server").kill()

    run = meanwhile(driver, kill)
    assert run.failures == []
    assert largest_difference(run.parameters, train_alone("digits-mlp", 1, 40, "sgd:lr=0.1", torch.float32)) < 1e-5


def test_a_server_that_is_gone_keeps_nobody_from_waiting_for_the_others(tmp_path: Path) -> None:
    """Or a worker would go round and round until it is back."""
    listener = Listener(tmp_path / "1")
    connections = ServerConnections(None, None, None, None)
    connections.links = [LocalServerLink(Link(tmp_path / str(shard), b"0:0")) for shard in range(2)]
    assert [link.gone for link in connections.links] == [True, False]
    began = time.monotonic()
    assert not connections.receive_any({0, 1}, 0.2)
    assert time.monotonic() - began > 0.15
    connections.close()
    listener.close()


@pytest.mark.parametrize("multihost", [LOCAL, OPEN], ids=["keys", "open"])
def test_what_is_wrong_is_refused_and_the_run_undisturbed(multihost: MultihostOptions, capfd) -> None:
    """Worker 1 says, between its pushes, what nobody should."""

    def work() -> None:
        world = session.init()
        said: Counter[str] = Counter()
        """To each server: what is said again after a lost connection would shift a count of all."""
        say = RemoteServerLink.send

        def say_more(self: RemoteServerLink, request: wire.Exchange | wire.Fetch) -> None:
            said[self.link.address] += 1
            if world.rank == 1 and said[self.link.address] % 5 == 2:
                for wrong in wrong_messages(self):
                    self.link.send(*wrong)
            say(self, request)

        RemoteServerLink.send = say_more
        digits(50, MOMENTUM)()

    def wrong_messages(shard: RemoteServerLink) -> Iterator[tuple[bytes, list[bytes]]]:
        run, life = shard.run, shard.incarnation
        push = Push(Handle(1, 0, 1000, 0, 0))
        good = wire.encode(wire.Exchange((push, Pull(1, 0, 1001)), None, (), ""))
        frames = [bytes(frame) for frame in shard.outgoing.frames]
        yield b"\xc1nonsense", []
        yield wrap(run, life, b"\xc1"), []
        yield wrap("another run", life, good), frames
        yield wrap(run, life + 1, good), frames
        yield wrap(run, life, good), []
        yield wrap(run, life, good), [*frames, b"more"]
        yield wrap(run, life, good), [frames[0][:-4], *frames[1:]]
        yield wrap(run, life, good), [frames[0] + b"1234", *frames[1:]]
        yield wrap(run, life, wire.encode(wire.Exchange((push, push), None, (), ""))), frames
        as_another = wire.Exchange((Push(Handle(0, 0, 1000, 0, 0)),), None, (), "")
        yield wrap(run, life, wire.encode(as_another)), frames
        yield wrap(run, life, wire.encode(wire.Exchange((Pull(1, 1, 3),), None, (), ""))), []

    run = live(far(work), multihost=multihost)
    assert largest_difference(run.parameters, alone_for(50, MOMENTUM)) < 1e-5
    told = capfd.readouterr().err
    assert told.count("refused a message of b'1:0'") == 2 * 3, "not a flood"
    assert len(re.findall(r"refused \d+ messages of b'1:0'", told)) == 2


@pytest.mark.parametrize("multihost", [LOCAL, OPEN], ids=["keys", "open"])
def test_a_worker_of_the_servers_host_that_also_speaks_over_tcp_is_refused(multihost: MultihostOptions, capfd) -> None:
    """Its gradient is in shared memory, so there is no memory on the server for what comes over TCP."""

    def rogue(worker: LiveWorker) -> None:
        connections, run, memory = worker.executor.connections, worker.run, worker.memory
        assert all(isinstance(link, LocalServerLink) for link in connections.links)
        keys = find_keys(run.folder, 0, 0) if multihost.keys else None
        payload = RemotePayload(memory.layout, memory.own, memory.gradient, None, None)
        link = RemoteServerLink(connections.endpoints[0], b"0:0", run.config.run, keys, payload, run.folder)
        link.assign(connections.assignment[0])
        link.send(wire.Exchange((Push(Handle(0, 0, 1000, 0, 0)), Pull(0, 0, 1001)), None, (), ""))
        staged = wrap(link.run, link.incarnation, wire.encode(wire.Staged(0, 0, 0)))
        link.link.send(staged, [link.outgoing.frames[0]])
        link.send(wire.Fetch("answered"))  # which is answered when what was said before it has been read
        while not isinstance(link.receive(1.0), wire.Fetched):
            assert not link.gone
        link.close()

    def work() -> None:
        step = paceline.Optimizer.step

        def step_and_speak(self: paceline.Optimizer, *given: object, **named: object) -> object:
            if self.world.rank == 0 and self.global_step == 10:
                assert isinstance(self.world.live, LiveWorker)
                rogue(self.world.live)
            return step(self, *given, **named)

        paceline.Optimizer.step = step_and_speak
        digits(50, MOMENTUM)()

    run = live(far(work, frozenset({1, 2})), multihost=multihost)
    assert largest_difference(run.parameters, alone_for(50, MOMENTUM)) < 1e-5
    told = capfd.readouterr().err.splitlines()
    assert len([line for line in told if "refused a message of b'0:0'" in line]) == 2
    assert sum("this worker is on the server's host and speaks through shared memory" in line for line in told) >= 1
    assert "Traceback" not in "".join(told)


@pytest.mark.parametrize("multihost", [LOCAL, OPEN], ids=["keys", "open"])
def test_what_is_intact_and_cannot_be_read_ends_the_connection_and_both_sides_say_again(
    multihost: MultihostOptions, tmp_path: Path, capfd
) -> None:
    """Behind a push, whose answer then finds nobody connected; and before one, which is then not read."""
    before, behind = (10, 20, 30), (15, 25, 35)
    noted = tmp_path / "noted"

    def work() -> None:
        world = session.init()
        say, reopen = RemoteServerLink.send, RemoteServerLink.reopen
        said = 0

        def note(what: str) -> None:
            with noted.open("a") as file:
                file.write(f"{what} ")

        def say_nonsense(self: RemoteServerLink, request: wire.Exchange | wire.Fetch) -> None:
            nonlocal said
            said += 1
            nonsense = wrap(self.run, self.incarnation, b"\xc1"), [b"whatever"]
            if world.rank == 1 and said in before:
                self.link.send(*nonsense)
            note("said")
            say(self, request)
            if world.rank == 1 and said in behind:
                self.link.send(*nonsense)

        def reopen_and_note(self: RemoteServerLink) -> None:
            note("reopened")
            reopen(self)

        if world.rank == 1:
            RemoteServerLink.send, RemoteServerLink.reopen = say_nonsense, reopen_and_note
        digits(50, MOMENTUM)()

    run = live(far(work), multihost=multihost, members=Members(3, 1))
    assert largest_difference(run.parameters, alone_for(50, MOMENTUM)) < 1e-5
    counts = Counter(noted.read_text().split())
    assert counts["reopened"] >= len(before) + len(behind)
    assert counts["said"] >= 50 + len(before), "what stood behind it was not read, and is said again"
    assert "refused a message of b'1:0'" in capfd.readouterr().err


@pytest.mark.parametrize("multihost", [LOCAL, OPEN], ids=["keys", "open"])
def test_an_answer_that_cannot_be_read_is_asked_for_again(multihost: MultihostOptions, monkeypatch, capfd) -> None:
    send = RemoteWorkers.send
    due = {10, 20, 30}

    def spoil(self: RemoteWorkers, name: bytes, message: bytes, *rest) -> bool:
        answer = wire.decode_from_shard(message)
        if name == b"1:0" and isinstance(answer, Parameters) and answer.iteration in due:
            due.remove(answer.iteration)
            return send(self, name, b"\xc1", [b"whatever"])
        return send(self, name, message, *rest)

    monkeypatch.setattr(RemoteWorkers, "send", spoil)
    run = live(far(digits(50, MOMENTUM)), multihost=multihost)
    assert largest_difference(run.parameters, alone_for(50, MOMENTUM)) < 1e-5
    assert len(re.findall(r"refused what \S+ sent", capfd.readouterr().err)) == 2 * 3


def test_a_worker_without_its_key_says_so(capfd) -> None:
    def work() -> None:
        here = session.init().run
        assert here is not None
        (here.folder / f"key-{here.rank}.0").unlink()
        digits(5)()

    assert len(driver_of(far(work)).run().failures) == 3
    assert "worker 1 has no key to reach servers on other hosts" in capfd.readouterr().err
