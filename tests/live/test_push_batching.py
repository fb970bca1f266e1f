"""Pushes that have come together: stepped on in one pass, and nobody can tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline import policies, session
from paceline.core.messages import Handle, Members, Parameters, Pull, Push, View
from paceline.function_workers import function_starter
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.messaging.unix_sockets import Link, Listener, Waiter, server_path
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.configuration import LiveConfig, MultihostOptions
from paceline.runtime.live.server import push_batching, shard_executor
from paceline.runtime.live.server.connection import ServerConnection
from paceline.runtime.live.server.server import LiveServer
from paceline.runtime.live.server.shard_executor import ShardExecutor
from paceline.runtime.live.storage import shared_memory
from paceline.tensors import assignment, fused_kernels, fused_optimizers, optimizers
from paceline.tensors.layout import layout_of
from paceline.tensors.piece_optimizers import Hyper
from paceline.tensors.shard_optimizer import ShardOptimizer

WORKERS, STEPS = 4, 30


def run(
    policy: str, folder: Path, monkeypatch: pytest.MonkeyPatch, others: bool = False, **sgd: float
) -> tuple[torch.Tensor, list[int]]:
    """Gradients are ones, and after each step a worker's model must be what its version says. How many steps were taken
    together each time; a server that is slow has several pushes waiting."""
    monkeypatch.setattr(shard_executor, "WORTH_IT", 0)
    monkeypatch.setattr(push_batching, "others_run", lambda: others)
    flush_deferred, apply, seen = ShardExecutor.flush_deferred, ShardOptimizer.apply_each, folder / "seen"
    seen.write_text("")

    def note(self: ShardExecutor) -> None:
        if self.deferred.steps:
            with seen.open("a") as file:
                file.write(f"{len(self.deferred.steps)}\n")
        flush_deferred(self)

    def apply_slowly(self: ShardOptimizer, *arguments: object, **more: object) -> None:
        time.sleep(0.002)
        apply(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardExecutor, "flush_deferred", note)
    monkeypatch.setattr(ShardOptimizer, "apply_each", apply_slowly)

    def work() -> None:
        parameter = torch.nn.Parameter(torch.zeros(1000))
        opt = paceline.Optimizer(torch.optim.SGD([parameter], lr=0.5, **sgd))
        live = session.init().live
        assert live is not None
        assert not live.steps_here
        for _ in range(STEPS):
            parameter.grad = torch.ones(1000)
            opt.step()
            if not sgd:
                expected = -live.machine.versions[0] * 0.5 / WORKERS
                assert parameter.eq(expected).all(), (parameter.min(), parameter.max(), expected)
        (folder / f"done-{live.run.rank}").touch()
        while len(list(folder.glob("done-*"))) < WORKERS:  # a gradient weighs more once somebody has left
            time.sleep(0.01)

    plan = RunPlan(Members(WORKERS, 1), function_starter(work), policies.parse(policy), care=FaultPolicy(timeout_s=60))
    (values,) = Driver(plan).run().parameters.values()
    return values, [int(line) for line in seen.read_text().split()]


@pytest.mark.parametrize("policy", ["asp", "ssp:staleness=1", "waiting:delay_s=0.001"])
def test_each_worker_gets_the_values_after_its_own_step(policy: str, tmp_path: Path, monkeypatch) -> None:
    values, seen = run(policy, tmp_path, monkeypatch)
    assert values.eq(-WORKERS * STEPS * 0.5 / WORKERS).all()
    assert max(seen) > 1, "none were taken together"
    assert max(seen) <= push_batching.MOST


@pytest.mark.skipif(not fused_kernels.are_compiled(), reason="there was no C compiler")
def test_steps_with_momentum_are_taken_together_too(tmp_path: Path, monkeypatch) -> None:
    values, seen = run("asp", tmp_path, monkeypatch, momentum=0.9)
    expected = momentum = 0.0
    for _ in range(WORKERS * STEPS):
        momentum = 0.9 * momentum + 1
        expected -= 0.5 / WORKERS * momentum
    torch.testing.assert_close(values, torch.full_like(values, expected), rtol=1e-4, atol=0)
    assert max(seen) > 1, "none were taken together"


def test_steps_that_torch_takes_are_taken_one_by_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(fused_optimizers, "can_step", lambda name, values: False)
    values, seen = run("asp", tmp_path, monkeypatch, momentum=0.9)
    assert not seen
    assert values.lt(-STEPS * 0.5).all()


def test_a_crowded_server_waits_for_those_who_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shard_executor.os, "sched_getaffinity", lambda pid: {0})
    values, seen = run("asp", tmp_path, monkeypatch, others=True)
    assert values.eq(-WORKERS * STEPS * 0.5 / WORKERS).all()
    assert sum(seen) == WORKERS * STEPS
    assert max(seen) > 1


def server_in(folder: Path, policy: str, workers: int) -> LiveServer:
    """A server as its driver and its workers would have it, without any of them."""
    output = folder / "output"
    output.mkdir()
    config = LiveConfig(Members(workers, 2), 0, None, str(output), "eps")
    (folder / "config").write_bytes(msgspec.json.encode(config))
    layout = layout_of([("w", torch.zeros(2000), 0)])
    shared_memory.create(folder / shared_memory.WHOLE, layout).zero_()
    segments = [shared_memory.create(shared_memory.segment_path(folder, rank, 0), layout) for rank in range(workers)]
    halves = assignment.initial(layout, 2)
    spec = optimizers.parse("sgd:lr=1")
    order = wire.Configure(policy, layout, halves, spec, time.monotonic(), None, None, None)
    server = LiveServer(ServerConnection(folder, 0, 0), order)
    server.handle_order(wire.NewView(View(1, tuple((rank, 0) for rank in range(workers)))))
    for rank in range(workers):
        server.take(b"%d:0" % rank, wire.encode(wire.Exchange((Pull(rank, 0, 0),), None, (), "")))
    for segment in segments:
        segment.fill_(1.0)
    return server


def part_of(server: LiveServer, whole: torch.Tensor) -> torch.Tensor:
    return torch.cat([whole[start:stop] for start, stop in server.state.part])


def end(server: LiveServer) -> None:
    server.run.close()


def pushed(rank: int, hyper: tuple[Hyper, ...] | None = None, iteration: int = 0) -> tuple[bytes, bytes]:
    messages = (Push(Handle(rank, 0, iteration, 0, 4000)), Pull(rank, 0, iteration + 1))
    return b"%d:0" % rank, wire.encode(wire.Exchange(messages, hyper, (), ""))


@pytest.mark.parametrize("order", ["hyper", "checkpoint", "finish"])
@pytest.mark.usefixtures("driver")
def test_what_the_driver_orders_finds_every_step_taken(order: str, tmp_path: Path, monkeypatch) -> None:
    """Two of three workers die; the third's gradient is the mean, while messages of the dead still wait."""
    monkeypatch.setattr(shard_executor, "WORTH_IT", 0)
    server = server_in(tmp_path, "bsp", 3)
    slower = ({**optimizers.parse("sgd:lr=1").groups[0], "lr": 0.125},) if order == "hyper" else None
    server.take(*pushed(1, slower))
    server.run.listener.inbox.append(pushed(2))
    server.handle_order(wire.NewView(View(2, ((1, 0),))))
    if order == "checkpoint":
        server.handle_order(wire.Checkpoint(str(tmp_path)))
        (saved,) = tmp_path.glob("*.safetensors")
        assert any(tensor.eq(-1.0).all() for tensor in load_file(saved).values())
    elif order == "finish":
        server.handle_order(wire.Finish())
        assert part_of(server, shared_memory.attach(tmp_path / shared_memory.WHOLE, server.state.layout)).eq(-1.0).all()
    server.take_messages()
    assert server.state.optimizer.values.eq(-1.0).all(), "at the rate there was when it was taken"
    end(server)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Listener]:
    driver = Listener(tmp_path / "driver")
    yield driver
    driver.close()


@pytest.fixture
def crowded(tmp_path: Path, driver: Listener, monkeypatch) -> Iterator[LiveServer]:
    """A server of four workers that would wait a long time for their pushes. One has come."""
    monkeypatch.setattr(shard_executor, "WORTH_IT", 0)
    monkeypatch.setattr(push_batching, "others_run", lambda: True)
    monkeypatch.setattr(shard_executor.os, "sched_getaffinity", lambda pid: {0})
    server = server_in(tmp_path, "asp", 4)
    server.run.listener.inbox.append(pushed(0))
    server.take_messages()
    assert server.executor.pacing.patience_s > 0
    server.executor.pacing.patience_s = 20.0
    server.run.listener.inbox.append(pushed(1))
    yield server
    end(server)


def took(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def test_it_waits_until_everybody_has_pushed(crowded: LiveServer) -> None:
    links = [Link(server_path(crowded.run.folder, 0, 0), b"%d:0" % rank) for rank in (0, 2, 3)]

    def push() -> None:
        for rank, link in zip((0, 2, 3), links, strict=True):
            time.sleep(0.03)
            link.send(pushed(rank)[1])

    thread = threading.Thread(target=push)
    thread.start()
    assert 0.08 < took(crowded.let_others_run) < 10
    assert len(crowded.run.listener.inbox) == 4
    thread.join()
    for link in links:
        link.close()


def test_it_waits_no_longer_than_others_run(crowded: LiveServer, monkeypatch) -> None:
    left = iter([True, True, False])
    monkeypatch.setattr(push_batching, "others_run", lambda: next(left))
    assert took(crowded.let_others_run) < 10
    assert next(left, None) is None


def test_it_waits_no_longer_than_a_pass_took(crowded: LiveServer) -> None:
    crowded.executor.pacing.patience_s = 0.05
    assert 0.05 <= took(crowded.take_messages) < 10
    assert not crowded.run.listener.inbox


def test_it_does_not_keep_the_driver_waiting(crowded: LiveServer, driver: Listener) -> None:
    waiter = Waiter()
    waiter.watch(driver)
    while not driver.named:  # it hears who calls
        waiter.wait(0.1)
    driver.send(b"server:0", wire.encode(wire.Finish()))
    assert took(crowded.let_others_run) < 10
    driver.close()
    waiter.close()


def test_it_does_not_wait_for_those_who_are_parked(crowded: LiveServer) -> None:
    crowded.executor.waits = dict.fromkeys((0, 2, 3), "too far ahead")
    assert took(crowded.let_others_run) < 10
    assert not crowded.executor.pacing.rest, "it was not in vain"


def test_after_waits_in_vain_it_waits_less(crowded: LiveServer) -> None:
    """The busy one is not a worker: passes with a wait become rare, until a wait brings something."""
    crowded.executor.pacing.patience_s = 0.001
    waits = []
    for number in range(200):
        resting = crowded.executor.pacing.resting
        crowded.let_others_run()
        if not resting:
            waits.append(number)
    assert waits == [0, 2, 6, 14, 30, 62, 126, 191]
    crowded.executor.pacing.resting, crowded.executor.pacing.patience_s = 0, 20.0
    link = Link(server_path(crowded.run.folder, 0, 0), b"2:0")
    for _ in range(3):
        link.send(pushed(2)[1])
    assert took(crowded.let_others_run) < 10
    assert crowded.executor.pacing.rest == crowded.executor.pacing.resting == 0
    link.close()


@pytest.mark.parametrize(
    ("ranks", "parked", "all_wait"),
    [((0, 1, 2, 3), (), True), ((0, 1, 2), (), False), ((0, 1, 2), (3,), True), ((0, 1, 2), (2,), False)],
)
def test_cores_of_workers_are_taken_if_all_wait(
    ranks: tuple[int, ...], parked: tuple[int, ...], all_wait: bool, crowded: LiveServer, monkeypatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(ShardOptimizer, "apply_each", lambda *_, all_wait: told.append(all_wait))
    crowded.run.listener.inbox.clear()
    crowded.executor.waits = dict.fromkeys(parked, "too far ahead")
    crowded.executor.pacing.patience_s = 0.0
    crowded.run.listener.inbox.extend(pushed(rank, iteration=int(rank == 0)) for rank in ranks)
    crowded.take_messages()
    assert told == [all_wait]


def test_where_workers_may_be_elsewhere_it_waits_for_nobody(crowded: LiveServer) -> None:
    assert crowded.executor.is_crowded()
    crowded.run.config = msgspec.structs.replace(
        crowded.run.config, multihost=MultihostOptions("127.0.0.1", "", keys=False, shared_memory=False)
    )
    assert not crowded.executor.is_crowded()


def test_it_waits_for_nobody_where_steps_are_not_taken_together(crowded: LiveServer, monkeypatch) -> None:
    monkeypatch.setattr(shard_executor, "WORTH_IT", 1 << 30)
    crowded.executor.pacing.patience_s = 0.01
    crowded.take_messages()
    assert crowded.executor.pacing.patience_s == 0


def test_it_waits_for_nobody_where_each_has_a_core(crowded: LiveServer, monkeypatch) -> None:
    monkeypatch.setattr(shard_executor.os, "sched_getaffinity", lambda pid: set(range(5)))
    assert crowded.executor.is_crowded(), "four workers and two servers"
    monkeypatch.setattr(shard_executor.os, "sched_getaffinity", lambda pid: set(range(6)))
    crowded.executor.pacing.patience_s = 0.01
    crowded.take_messages()
    assert crowded.executor.pacing.patience_s == 0


@pytest.mark.usefixtures("driver")
def test_answers_go_out_in_order_once_their_steps_are_taken(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shard_executor, "WORTH_IT", 0)
    server = server_in(tmp_path, "asp", 6)
    segments = [
        shared_memory.attach(shared_memory.segment_path(tmp_path, rank, 0), server.state.layout) for rank in range(6)
    ]
    answers: list[tuple[bytes, int, float]] = []

    def answered(peer: bytes, message: bytes) -> bool:
        parameters = wire.decode_from_shard(message)
        assert isinstance(parameters, Parameters)
        answers.append((peer, parameters.version, part_of(server, segments[int(peer[:1])])[0].item()))
        return True

    monkeypatch.setattr(server.run.listener, "send", answered)
    server.run.listener.inbox.extend(pushed(rank) for rank in range(6))
    server.take_messages()
    assert answers == [(b"%d:0" % rank, rank + 1, pytest.approx(-(rank + 1) / 6)) for rank in range(6)]
    for rank, segment in enumerate(segments):
        assert part_of(server, segment).sub((rank + 1) / -6).abs().max() < 1e-6
        assert segment.eq(1.0).sum() == 2000 - len(part_of(server, segment)), "the other server's part"
    assert not server.executor.deferred.steps
    end(server)
