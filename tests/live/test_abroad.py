"""Workers and servers on different hosts: the same runs, over TCP.

Here all are on one host, and workers are made to believe that they are not. What really are several hosts (namespaces)
is in tests of their own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
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
from paceline.core.messages import Handle, Members, Pull, Push
from paceline.run import Run
from paceline.runtime.live import wire
from paceline.runtime.live.across import abroad as across_hosts
from paceline.runtime.live.across import doors
from paceline.runtime.live.across.abroad import Cargo, FarShard
from paceline.runtime.live.across.sealing import seal
from paceline.runtime.live.configuration import Abroad, Door
from paceline.runtime.live.driver.children import function_starter
from paceline.runtime.live.driver.keeping import Keeping
from paceline.runtime.live.driver.launch import Driver, LivePlan
from paceline.runtime.live.driver.watching import Care
from paceline.runtime.live.server.durable import Durable
from paceline.runtime.live.sockets import Link, Listener
from paceline.runtime.live.worker.talking import Talk
from paceline.runtime.live.worker.worker import LiveWorker
from paceline.tensors import optimizers
from paceline.training import train
from tests.reference import largest_difference, train_alone

LOCAL = Abroad("127.0.0.1", "", (0, 0))
OPEN = msgspec.structs.replace(LOCAL, keys=False)
ALL = frozenset(range(16))
MOMENTUM = "sgd:lr=0.05,momentum=0.9"


def far(work: Callable[[], object], ranks: frozenset[int] = ALL) -> Callable[[], None]:
    """The same work, by workers of which these cannot reach a server through shared memory."""

    def run() -> None:
        if session.init().rank in ranks:
            doors.knock = lambda *where: None
        work()

    return run


def digits(iterations: int, optimizer: str = "sgd:lr=0.1", workload: str = "digits-mlp") -> Callable[[], None]:
    return partial(train, workloads.load(workload), optimizers.parse(optimizer), 32, iterations, 0)


def driver_of(work: Callable[[], object], policy: str = "bsp", abroad: Abroad = LOCAL, **more) -> Driver:
    given = {"cluster": load("steady:compute_s=0"), "care": Care(timeout_s=60), **more}
    members = given.pop("members", Members(3, 2))
    say = given.pop("say", lambda line: None)
    return Driver(LivePlan(members, function_starter(work), policies.parse(policy), abroad=abroad, **given), say=say)


def live(work: Callable[[], object], policy: str = "bsp", abroad: Abroad = LOCAL, **more) -> Run:
    run = driver_of(work, policy, abroad, **more).run()
    assert run.failures == []
    assert run.replay() == []
    return run


def meanwhile(driver: Driver, deed: Callable[[], None]) -> Run:
    """Run, and do `deed` once the run has got going; an error in it fails the test."""
    errors: list[BaseException] = []

    def wait_and_do() -> None:
        try:
            while len(driver.history) < 20:
                time.sleep(0.001)
            deed()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait_and_do)
    thread.start()
    try:
        return driver.run()
    finally:
        thread.join()
        assert not errors


def my_links() -> list[FarShard]:
    """In a worker: its links to servers on other hosts."""
    worker = session.init().live
    assert worker is not None
    return [link for link in worker.talk.links if isinstance(link, FarShard)]


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
    run = live(far(digits(50)), abroad=OPEN)
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


@pytest.mark.parametrize("way", ["bfloat16", "float16"])
@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_halves_train_digits(way: str, policy: str) -> None:
    run = live(far(digits(250, MOMENTUM)), policy, msgspec.structs.replace(LOCAL, wire=way))
    assert max(point.accuracy for point in run.history) >= 0.95


def test_overlap_over_tcp() -> None:
    def work() -> None:
        world = session.init()
        workload = workloads.load("digits-mlp")
        module = workload.module(0)
        inner = torch.optim.SGD(module.parameters(), lr=0.1)
        opt = paceline.Optimizer(inner, model=module, overlap=world.rank != 1)
        dealer = paceline.dealing.Dealer(len(workload.train[0]), world.size, 32, 0)
        for step in range(50):
            samples = torch.from_numpy(dealer.deal(world.rank, step))
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
        keeping=Keeping(tmp_path, every_updates=20),
    )
    before: list[Door] = []

    def kill() -> None:
        keeper = driver.keeper
        while keeper is None or keeper.last is None:
            time.sleep(0.001)
        before.append(driver.servers.doors[1])
        next(c for c in driver.children.values() if c.role == "server" and c.rank == 1).kill()

    run = meanwhile(driver, kill)
    assert run.failures == []
    assert run.replay() == []
    after = driver.servers.doors[1]
    assert (after.life, after.address) == (1, before[0].address)
    assert after.key != before[0].key
    assert [record.node.rank for record in run.trace if isinstance(record.event, Restored)] == [1]
    assert run.history[-1].accuracy > 0.85


def test_a_killed_worker_is_started_again_with_another_key() -> None:
    cluster = load("steady:compute_s=0.005")
    driver = driver_of(far(digits(150)), "ssp:staleness=3", cluster=cluster, care=Care(restarts=1, timeout_s=60))

    def kill() -> None:
        next(child for child in driver.live_workers() if child.rank == 1).kill()

    run = meanwhile(driver, kill)
    assert run.failures == []
    pulls = {(r.event.pull.worker, r.event.pull.incarnation) for r in run.trace if hasattr(r.event, "pull")}
    assert (1, 1) in pulls
    assert driver.enrolling.known == {}


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


@pytest.mark.parametrize("way", ["float32", "bfloat16"])
def test_another_number_of_servers(way: str) -> None:
    resizes = (Resize(3, at_iteration=10), Resize(1, at_iteration=20))
    abroad = msgspec.structs.replace(LOCAL, wire=way)
    cluster = replace(load("steady:compute_s=0.004"), resizes=resizes)
    run = live(far(digits(50, MOMENTUM), frozenset({0, 2})), abroad=abroad, cluster=cluster)
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
    ("abroad", "way"),
    [(LOCAL, "float32"), (LOCAL, "bfloat16"), (OPEN, "float32")],
    ids=["keys-float32", "keys-bfloat16", "open-float32"],
)
@pytest.mark.parametrize("pause_s", [0.0, 0.02], ids=["before the answer", "with the answer under way"])
def test_a_connection_that_breaks_is_mended_and_nothing_counts_twice(abroad: Abroad, way: str, pause_s: float) -> None:
    """What was said is said again: BSP stays exact, whether the push, or the answer, or neither was lost."""

    def work() -> None:
        said = broken = 0
        say = FarShard.say

        def say_and_break(self: FarShard, request: wire.Exchange | wire.Fetch) -> None:
            nonlocal said, broken
            said += 1
            say(self, request)
            if said % 25 == 7 * session.init().rank:
                time.sleep(pause_s)
                for connection in tcp_connections():
                    connection.shutdown(socket.SHUT_RDWR)
                    broken += 1

        FarShard.say = say_and_break
        digits(25, MOMENTUM)()
        assert broken > 2

    run = live(far(work), abroad=msgspec.structs.replace(abroad, wire=way))
    assert largest_difference(run.parameters, alone_for(25, MOMENTUM)) < (1e-5 if way == "float32" else 0.05)


@pytest.mark.parametrize("abroad", [LOCAL, OPEN], ids=["keys", "open"])
def test_whoever_is_waited_for_all_links_are_looked_after(abroad: Abroad) -> None:
    """Server 0 may wait for a worker that waits for server 1, which waits for what we have said to it."""

    def work() -> None:
        module = torch.nn.Linear(3, 2)
        opt = paceline.Optimizer(torch.optim.SGD(module.parameters(), lr=0.1), model=module)
        talk = session.init().live.talk
        for _ in range(5):
            talk.links[1].reopen()
            until = time.monotonic() + 5.0
            while not talk.links[1].link.stands:
                assert time.monotonic() < until
                assert not talk.hear_any({0}, 0.05)
            opt.zero_grad()
            module(torch.ones(1, 3)).sum().backward()
            opt.step()

    live(far(work), abroad=abroad)


def loosely(work: Callable[[], object], loosened: int) -> Callable[[], None]:
    """The same work, by workers whose gradients go to other hosts from where they are, so often at least."""

    def run() -> None:
        goes: list[bool] = []
        loosen = Talk.loosen

        def loosen_and_tell(talk: Talk, cargo: Cargo, gradients: Sequence[torch.Tensor | None]) -> bool:
            goes.append(loosen(talk, cargo, gradients))
            return goes[-1]

        across_hosts.WORTH_IT, Talk.loosen = 0, loosen_and_tell
        work()
        assert sum(goes) >= loosened

    return run


def test_gradients_that_leave_from_where_they_are_survive_connections_and_servers_that_change() -> None:
    knock = doors.knock

    def work() -> None:
        doors.knock = lambda folder, process, shard, door: knock(folder, process, shard, door) if shard == 2 else None
        say, said = FarShard.say, 0

        def say_and_break(self: FarShard, request: wire.Exchange | wire.Fetch) -> None:
            nonlocal said
            said += 1
            say(self, request)
            if said % 25 == 7 * session.init().rank:
                for connection in tcp_connections():
                    connection.shutdown(socket.SHUT_RDWR)

        FarShard.say = say_and_break
        digits(50, MOMENTUM)()
        worker = session.init().live
        assert worker is not None
        assert worker.talk.cargo is not None
        assert not worker.talk.cargo.loose, "nobody holds the gradient any more"

    resizes = (Resize(3, at_iteration=10), Resize(1, at_iteration=20))
    cluster = replace(load("steady:compute_s=0.004"), resizes=resizes)
    run = live(loosely(work, 30), abroad=OPEN, cluster=cluster)
    assert [(each.before, each.after) for each in run.server_changes] == [(2, 3), (3, 1)]
    assert largest_difference(run.parameters, alone_for(50, MOMENTUM)) < 1e-5


def test_a_gradient_that_was_to_leave_from_where_it_is_is_there_for_a_server_that_comes_near(tmp_path: Path) -> None:
    knock = doors.knock

    def work() -> None:
        doors.knock = lambda *where: None
        stand_still = LiveWorker.stand_still

        def stand_until_it_is_here(worker: LiveWorker) -> None:
            stand_still(worker)
            if worker.iteration == 20:
                doors.knock = knock
                (tmp_path / "now").touch()
                while not worker.talk.doors[0].life:
                    worker.await_driver()

        LiveWorker.stand_still = stand_until_it_is_here
        digits(40)()

    keeping = Keeping(tmp_path / "kept", durable=Durable())
    driver = driver_of(loosely(work, 20), abroad=OPEN, members=Members(1, 1), keeping=keeping)

    def kill() -> None:
        while not (tmp_path / "now").exists():
            time.sleep(0.001)
        next(child for child in driver.children.values() if child.role == "server").kill()

    run = meanwhile(driver, kill)
    assert run.failures == []
    assert largest_difference(run.parameters, train_alone("digits-mlp", 1, 40, "sgd:lr=0.1", torch.float32)) < 1e-5


def test_a_server_that_is_gone_keeps_nobody_from_waiting_for_the_others(tmp_path: Path) -> None:
    """Or a worker would go round and round until it is back."""
    listener = Listener(tmp_path / "1")
    talk = Talk(None)
    talk.links = [Link(tmp_path / str(shard), b"0:0") for shard in range(2)]
    assert [link.gone for link in talk.links] == [True, False]
    began = time.monotonic()
    assert not talk.hear_any({0, 1}, 0.2)
    assert time.monotonic() - began > 0.15
    talk.close()
    listener.close()


@pytest.mark.parametrize("abroad", [LOCAL, OPEN], ids=["keys", "open"])
def test_what_is_wrong_is_refused_and_the_run_undisturbed(abroad: Abroad, capfd) -> None:
    """Worker 1 says, between its pushes, what nobody should."""

    def work() -> None:
        world = session.init()
        said = 0
        say = FarShard.say

        def say_more(self: FarShard, request: wire.Exchange | wire.Fetch) -> None:
            nonlocal said
            said += 1
            if world.rank == 1 and said % 10 in (3, 4):  # to both shards
                for wrong in wrong_messages(self):
                    self.link.send(*wrong)
            say(self, request)

        FarShard.say = say_more
        digits(50, MOMENTUM)()

    def wrong_messages(shard: FarShard) -> Iterator[tuple[bytes, list[bytes]]]:
        run, life = shard.run, shard.life
        push = Push(Handle(1, 0, 1000, 0, 0))
        good = wire.encode(wire.Exchange((push, Pull(1, 0, 1001)), None, (), ""))
        frames = [bytes(frame) for frame in shard.frames]
        yield b"\xc1nonsense", []
        yield seal(run, life, b"\xc1"), []
        yield seal("another run", life, good), frames
        yield seal(run, life + 1, good), frames
        yield seal(run, life, good), []
        yield seal(run, life, good), [*frames, b"more"]
        yield seal(run, life, good), [frames[0][:-4], *frames[1:]]
        yield seal(run, life, good), [frames[0] + b"1234", *frames[1:]]
        yield seal(run, life, wire.encode(wire.Exchange((push, push), None, (), ""))), frames
        as_another = wire.Exchange((Push(Handle(0, 0, 1000, 0, 0)),), None, (), "")
        yield seal(run, life, wire.encode(as_another)), frames
        yield seal(run, life, wire.encode(wire.Exchange((Pull(1, 1, 3),), None, (), ""))), []

    run = live(far(work), abroad=abroad)
    assert largest_difference(run.parameters, alone_for(50, MOMENTUM)) < 1e-5
    told = capfd.readouterr().err
    assert told.count("refused a message of b'1:0'") == 2 * 3, "not a flood"
    assert told.count("refused 110 messages of b'1:0'") == 2


def test_a_worker_without_its_key_says_so(capfd) -> None:
    def work() -> None:
        here = session.init().live
        assert here is not None
        (here.folder / f"key-{here.rank}.0").unlink()
        digits(5)()

    assert len(driver_of(far(work)).run().failures) == 3
    assert "worker 1 has no key to reach servers on other hosts" in capfd.readouterr().err
