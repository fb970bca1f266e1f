"""`overlap=True` with servers on other hosts: frames leave while backward runs, and count only when all is pushed."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline import session
from paceline.cluster import Cluster, Resize, load
from paceline.core.events import Restored
from paceline.core.messages import Handle, Members, Pull, Push
from paceline.run import Run
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.configuration import MultihostOptions
from paceline.runtime.live.protocol.envelope import wrap
from paceline.runtime.live.server import remote_memory as receiving_side
from paceline.runtime.live.server.early_frames import EarlyFrameBuffer
from paceline.runtime.live.server.remote_workers import RemoteWorkers
from paceline.runtime.live.worker import outgoing_frames as sending_side
from paceline.runtime.live.worker.early_frames import EarlyFrameSender
from paceline.runtime.live.worker.remote_server_link import EarlyServerLink, RemoteServerLink
from paceline.tensors.layout import Entry, Layout
from paceline.tensors.wire_codecs import WrongFrames
from tests.live.test_remote_workers import LOCAL, OPEN, driver_of, far, live, meanwhile, my_links, tcp_connections

SMALL = 1 << 10
"""Bytes of a frame here, so that a small model has many."""
Move = Callable[[nn.Module, paceline.Optimizer, int], None]


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    for side in (sending_side, receiving_side):
        monkeypatch.setattr(side, "FRAME", SMALL)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder where each server leaves, at its end, one file of how many frames were staged and how many named."""
    counts = {"staged": 0, "named": 0, "most": 0}
    stage, commit, close = RemoteWorkers.stage, RemoteWorkers.commit, RemoteWorkers.close

    def count_staged(self: RemoteWorkers, sender, staged, frames) -> None:
        stage(self, sender, staged, frames)
        counts["staged"] += 1
        counts["most"] = max(counts["most"], len(self.memory_of(sender).early.frames))

    def count_named(self: RemoteWorkers, sender, worker, request, rest) -> None:
        commit(self, sender, worker, request, rest)
        counts["named"] += len(request.staged)
        assert not self.memory_of(sender).early.frames, "they are the gradient's now"

    def leave(self: RemoteWorkers) -> None:
        folder = tmp_path / "counts"
        folder.mkdir(exist_ok=True)
        (folder / str(os.getpid())).write_text(" ".join(str(value) for value in counts.values()))
        close(self)

    monkeypatch.setattr(RemoteWorkers, "stage", count_staged)
    monkeypatch.setattr(RemoteWorkers, "commit", count_named)
    monkeypatch.setattr(RemoteWorkers, "close", leave)
    return tmp_path / "counts"


def totals(folder: Path) -> tuple[int, int, int]:
    staged, named, most = zip(*(map(int, each.read_text().split()) for each in folder.iterdir()), strict=True)
    return sum(staged), sum(named), max(most)


def noise(step: int, rank: int | None = None) -> torch.Tensor:
    seed = 100 * step + (session.init().rank if rank is None else rank)
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))


def model() -> nn.Module:
    """Large enough for 17 frames and more, with small tensors that share a frame."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)))


def plain(module: nn.Module, opt: paceline.Optimizer, step: int) -> None:
    opt.zero_grad()
    module(noise(step)).pow(2).sum().backward()
    opt.step()


def train(move: Move, overlap: bool, steps: int = 6, workers: int = 2, policy: str = "bsp") -> Run:
    def work() -> None:
        module = model()
        inner = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        opt = paceline.Optimizer(inner, model=module, overlap=overlap)
        for step in range(steps):
            move(module, opt, step)

    return live(far(work), policy, members=Members(workers, 2))


def assert_equal(one: Run, other: Run) -> None:
    a, b = one.model(), other.model()
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(("policy", "workers"), [("bsp", 2), ("asp", 1)])
def test_the_same_bits_as_without(policy: str, workers: int, counted: Path) -> None:
    """Under asp with one worker: of several the order of arrival decides."""
    without = train(plain, False, workers=workers, policy=policy)
    assert totals(counted)[:2] == (0, 0)
    assert_equal(without, train(plain, True, workers=workers, policy=policy))
    staged, named, _ = totals(counted)
    assert staged == named == 6 * workers * frames_in_all()


def frames_in_all() -> int:
    """Of the model, on two servers."""

    def work() -> None:
        module = model()
        paceline.Optimizer(torch.optim.SGD(module.parameters(), lr=0.01), model=module, overlap=True)
        paceline.log(loss=float(sum(len(link.outgoing.frames) for link in my_links())))

    return int(live(far(work), "asp", members=Members(1, 2)).history[0].loss)


def test_under_asp_with_several_workers_it_trains(counted: Path) -> None:
    run = train(plain, True, steps=30, workers=3, policy="asp")
    assert all(torch.isfinite(value).all() for value in run.parameters.values())
    assert totals(counted)[1] > 0


def test_frames_are_at_the_server_before_backward_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward waits, before it computes the first layer's gradient, until the server has frames of the last."""
    stage = RemoteWorkers.stage

    def stage_and_say(self: RemoteWorkers, sender, staged, frames) -> None:
        stage(self, sender, staged, frames)
        (tmp_path / f"{staged.iteration}-{self.shard}-{staged.frame}").touch()

    monkeypatch.setattr(RemoteWorkers, "stage", stage_and_say)

    def wait(gradient: torch.Tensor) -> None:
        until = time.monotonic() + 20
        while not list(tmp_path.glob("2-1-*")):
            assert time.monotonic() < until, "nothing has come"
            time.sleep(0.001)
        assert not list(tmp_path.glob("2-0-0")), "the first layer's has not left: it is not there yet"

    def move(module: nn.Module, opt: paceline.Optimizer, step: int) -> None:
        opt.zero_grad()
        hidden = module[0](noise(step))
        if step == 2:
            hidden.register_hook(wait)
        module[2](module[1](hidden)).pow(2).sum().backward()
        opt.step()

    train(move, True, workers=1)


def fails_midway(module: nn.Module, opt: paceline.Optimizer, step: int) -> None:
    def closure(data: torch.Tensor, fails: bool) -> torch.Tensor:
        opt.zero_grad()
        hidden = module[0](data)
        if fails:
            hidden.register_hook(lambda gradient: 1 / 0)
        loss = module[2](module[1](hidden)).pow(2).sum()
        loss.backward()
        return loss

    if step in (1, 3):
        with pytest.raises(ZeroDivisionError):
            opt.step(lambda: closure(noise(step + 50), True))
    opt.step(lambda: closure(noise(step), False))


def skips(module: nn.Module, opt: paceline.Optimizer, step: int) -> None:
    if step != 3:
        opt.zero_grad()  # at 3 what was skipped at 2 adds up
    module(noise(step)).pow(2).sum().backward()
    opt.skip_step() if step == 2 else opt.step()


def not_finite(module: nn.Module, opt: paceline.Optimizer, step: int) -> None:
    opt.zero_grad()
    # Of the first layer only, which comes last: all the others have left by then.
    hidden = module[0](noise(step))
    if step == 2 and session.init().rank == 0:
        hidden.register_hook(lambda gradient: gradient * float("nan"))
    module[2](module[1](hidden)).pow(2).sum().backward()
    opt.step()
    assert opt.step_was_dropped == (step == 2 and session.init().rank == 0)


def goes_back_twice(module: nn.Module, opt: paceline.Optimizer, step: int) -> None:
    for attempt in range(1 + step % 3):
        opt.zero_grad()
        module(noise(step + 10 * attempt)).pow(2).sum().backward()
    opt.step()


def takes_gradients_away(module: nn.Module, opt: paceline.Optimizer, step: int) -> None:
    """By hand: all of them, then one layer's, then one for good."""
    opt.zero_grad()
    module(noise(step + 50)).pow(2).sum().backward()
    module.zero_grad()
    module(noise(step)).pow(2).sum().backward()
    for parameter in module[1].parameters():
        parameter.grad = None
    module[1](noise(step)).pow(2).sum().backward()
    if step % 2:
        module[2][0].weight.grad = None
    opt.step()


def drops_one(module: nn.Module, opt: paceline.Optimizer, step: int) -> None:
    """After it was sent, on one worker only: in the mean it is zero there."""
    opt.zero_grad()
    module(noise(step)).pow(2).sum().backward()
    if session.init().rank == 1:
        module[2][0].weight.grad = None
    opt.step()


def sets_a_gradient(module: nn.Module, opt: paceline.Optimizer, step: int) -> None:
    """Of one tensor, which backward does not reach. At step 3 all are left from the last."""
    if step == 3:
        opt.step()
        return
    opt.zero_grad()
    module[2](module[1](noise(step))).pow(2).sum().backward()
    module[0][0].weight.grad = torch.full_like(module[0][0].weight, 0.01 * step)
    opt.step()


@pytest.mark.parametrize(
    "move", [fails_midway, skips, not_finite, goes_back_twice, takes_gradients_away, drops_one, sets_a_gradient]
)
def test_what_is_not_pushed_counts_nowhere(move: Move, counted: Path) -> None:
    without = train(move, False)
    assert_equal(without, train(move, True))
    staged, named, most = totals(counted)
    assert 0 < named <= staged
    assert named < staged or move is sets_a_gradient
    assert most <= frames_in_all()


def test_a_backward_in_another_thread_sends_nothing_early(counted: Path) -> None:
    """Sockets are the stepping thread's."""

    def move(module: nn.Module, opt: paceline.Optimizer, step: int) -> None:
        opt.zero_grad()
        thread = threading.Thread(target=module(noise(step)).pow(2).sum().backward)
        thread.start()
        thread.join()
        opt.step()

    assert_equal(train(plain, False), train(move, True))
    assert totals(counted)[:2] == (0, 0)


def test_a_frame_torn_by_the_next_backward_is_not_used(counted: Path) -> None:
    """Nothing leaves while the first backward runs and the second writes the same memory: only then does all."""

    def move(module: nn.Module, opt: paceline.Optimizer, step: int) -> None:
        links = [link.link for link in my_links()]
        for link in links:
            link.is_connected = False  # what is sent waits in the outbox, without a copy
        for attempt in (50, 0):
            opt.zero_grad()
            module(noise(step + attempt)).pow(2).sum().backward()
        for link in links:
            assert len(link.outbox) > 10
            link.is_connected = True
        opt.step()

    assert_equal(train(plain, False, workers=1), train(move, True, workers=1))
    staged, named, _ = totals(counted)
    assert staged == 2 * named > 0


def test_more_frames_than_may_wait_for_a_connection(monkeypatch: pytest.MonkeyPatch, counted: Path) -> None:
    """A transport takes 64 messages; the server hears nothing until all were sent."""
    for side in (sending_side, receiving_side):
        monkeypatch.setattr(side, "FRAME", 1 << 7)
    assert_equal(train(plain, False), train(plain, True))
    assert totals(counted)[2] > 64


def test_what_is_wrong_is_refused_and_the_run_undisturbed(capfd) -> None:
    """Worker 1 stages, in the middle of its backwards, what nobody should."""

    def wrong(shard: EarlyServerLink, iteration: int) -> Iterator[tuple[bytes, list[bytes]]]:
        frames = [bytes(len(frame)) for frame in shard.outgoing.frames]
        attempt = shard.early.attempt
        for number in (-1, len(frames), 1 << 40):
            yield wire.encode(wire.Staged(iteration, attempt, number)), frames[:1]
        for ahead in (iteration + 1, iteration + 1000):
            yield wire.encode(wire.Staged(ahead, attempt, 0)), frames[:1]
        push, pull = Push(Handle(1, 0, iteration, 0, 0)), Pull(1, 0, iteration + 1)
        good = wire.Exchange((push, pull), None, (), "")
        everything = tuple(range(len(frames)))
        yield wire.encode(wire.Commit(good, attempt + 1000, everything)), []
        yield wire.encode(wire.Commit(good, attempt, (*everything, len(frames)))), []
        yield wire.encode(wire.Commit(wire.Exchange((pull,), None, (), ""), attempt, ())), frames
        other = wire.Exchange((Push(Handle(0, 0, iteration, 0, 0)),), None, (), "")
        yield wire.encode(wire.Commit(other, attempt, everything)), []
        # These end the connection: of what follows some may be lost.
        yield wire.encode(wire.Commit(good, attempt, ())), frames[1:]
        for more in ([], [frames[0], frames[0]], [frames[0][:-4]], [frames[0] + b"1234"]):
            yield wire.encode(wire.Staged(iteration, attempt, 0)), more

    def late(shard: EarlyServerLink, iteration: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """What a connection that broke may bring: dropped, and no word of it."""
        frames = [bytes(len(frame)) for frame in shard.outgoing.frames]
        for number, frame in enumerate(frames):
            yield wire.encode(wire.Staged(iteration - 1, 1 << 40, number)), [frame]
            yield wire.encode(wire.Staged(iteration, -1, number)), [frame]
        over = wire.Exchange((Push(Handle(1, 0, iteration - 1, 0, 0)), Pull(1, 0, iteration)), None, (), "")
        yield wire.encode(wire.Commit(over, 0, (0,))), []

    def move(module: nn.Module, opt: paceline.Optimizer, step: int) -> None:
        def say(gradient: torch.Tensor) -> None:
            for shard in my_links():
                for message, frames in (*late(shard, step), *(wrong(shard, step) if step > 3 else ())):
                    shard.link.send(wrap(shard.run, shard.incarnation, message), frames)

        opt.zero_grad()
        hidden = module[0](noise(step))
        if session.init().rank == 1:
            hidden.register_hook(say)
        module[2](module[1](hidden)).pow(2).sum().backward()
        opt.step()

    assert_equal(train(plain, False), train(move, True))
    told = capfd.readouterr().err
    assert told.count("refused a message of b'1:0'") == 2 * 3, "not a flood"
    counts = [int(count) for count in re.findall(r"refused (\d+) messages of b'1:0'", told)]
    assert len(counts) == 2
    assert all(9 + 1 <= count <= 2 * (9 + 5) for count in counts), told


@pytest.mark.parametrize("when", ["in backward", "before the state is fetched", "before the step", "after it was said"])
def test_over_a_connection_that_breaks_everything_is_sent_again(when: str, counted: Path) -> None:
    def cut() -> None:
        broken = 0
        for connection in tcp_connections():
            connection.shutdown(socket.SHUT_RDWR)
            broken += 1
        assert broken == 2

    def move(module: nn.Module, opt: paceline.Optimizer, step: int) -> None:
        mine = step in (2, 4) and session.init().rank == 1
        opt.zero_grad()
        hidden = module[1](module[0](noise(step)))
        if mine and when in ("in backward", "before the state is fetched"):
            hidden.register_hook(lambda gradient: cut())
        module[2](hidden).pow(2).sum().backward()
        if mine and when == "before the step":
            cut()
        if mine and when == "before the state is fetched":
            opt.state_dict()  # mends the connection
        if mine and when == "after it was said":
            worker = session.init().live
            flush = worker.executor.connections.flush

            def flush_and_cut(*arguments) -> None:
                flush(*arguments)
                worker.executor.connections.flush = flush
                cut()

            worker.executor.connections.flush = flush_and_cut
        opt.step()

    assert_equal(train(plain, False), train(move, True))
    assert totals(counted)[1] > 0


@pytest.mark.parametrize("multihost", [LOCAL, OPEN], ids=["keys", "open"])
@pytest.mark.parametrize("when", ["before backward", "in backward", "any time"])
def test_a_killed_server_comes_back_and_is_sent_everything(
    when: str, multihost: MultihostOptions, tmp_path: Path
) -> None:
    """Workers hear of its next life, in which it knows of no frame, at the worst moments there are, or when they do."""

    def await_next_life() -> None:
        worker = session.init().live
        (tmp_path / f"waits-{worker.run.rank}").touch()
        while worker.executor.connections.endpoints[1].incarnation == 0:
            worker.orders.await_driver()

    def work() -> None:
        module = model()
        opt = paceline.Optimizer(torch.optim.SGD(module.parameters(), lr=0.001), model=module, overlap=True)
        while (step := opt.global_step) < 100:
            opt.zero_grad()
            if step == 50 and when == "before backward":
                await_next_life()
            hidden = module[1](module[0](noise(step)))
            if step == 50 and when == "in backward":
                hidden.register_hook(lambda gradient: await_next_life())
            module[2](hidden).pow(2).sum().backward()
            opt.step()
            paceline.log(loss=0.0)

    checkpointing = CheckpointOptions(tmp_path, every_updates=20)
    driver = driver_of(far(work), multihost=multihost, members=Members(2, 2), checkpointing=checkpointing)

    def kill() -> None:
        while driver.parts.checkpointer is None or driver.parts.checkpointer.last is None:
            time.sleep(0.001)
        while when != "any time" and len(list(tmp_path.glob("waits-*"))) < 2:
            time.sleep(0.001)
        next(c for c in driver.parts.children.values() if c.role == "server" and c.rank == 1).kill()

    run = meanwhile(driver, kill)
    assert run.failures == []
    assert run.replay() == []
    assert [record.node.rank for record in run.trace if isinstance(record.event, Restored)] == [1]
    assert all(torch.isfinite(value).all() for value in run.parameters.values())


def test_another_number_of_servers() -> None:
    def train_with(overlap: bool, cluster: Cluster) -> Run:
        def work() -> None:
            module = model()
            opt = paceline.Optimizer(torch.optim.SGD(module.parameters(), lr=0.01), model=module, overlap=overlap)
            for step in range(40):
                plain(module, opt, step)

        return live(far(work), members=Members(2, 2), cluster=cluster)

    changing = replace(load("steady:compute_s=0.004"), resizes=(Resize(3, at_iteration=10), Resize(1, at_iteration=20)))
    run = train_with(True, changing)
    assert [(each.before, each.after) for each in run.server_changes] == [(2, 3), (3, 1)]
    assert_equal(train_with(False, load("steady:compute_s=0")), run)


@pytest.mark.parametrize("way", ["bfloat16", "int4"])
def test_codes_leave_at_the_step(way: str) -> None:
    def work() -> None:
        module = model()
        opt = paceline.Optimizer(torch.optim.SGD(module.parameters(), lr=0.01), model=module, overlap=True)
        plain(module, opt, 0)
        assert [type(link) for link in my_links()] == [RemoteServerLink, RemoteServerLink]

    local = MultihostOptions("127.0.0.1", "", (0, 0), wire=way)
    live(far(work), multihost=local)


def test_frames_are_whole_when_all_their_tensors_are_staged() -> None:
    shapes = [(3,), (0,), (5,), (8,), (2,)]
    layout = Layout(tuple(Entry(str(index), shape, 0) for index, shape in enumerate(shapes)), "float32")
    ahead = EarlyFrameSender(layout, ((0, 4), (4, 8), (8, 12), (12, 18)), count())
    assert ahead.stage(4) == []
    assert ahead.stage(3) == [2, 3]
    assert ahead.stage(1) == []
    assert ahead.stage(2) == [1]
    assert ahead.stage(0) == [0]
    ahead.end([2])
    assert ahead.sent == {2, 3}
    assert ahead.stage(3) == [2]
    assert ahead.attempt == 1


def test_a_server_keeps_one_attempt_and_each_frame_once() -> None:
    places = [torch.zeros(2), torch.zeros(3)]
    kept = EarlyFrameBuffer([piece.nbytes for piece in places])
    frames = [memoryview(bytes([number]) * 8) for number in range(4)]
    kept.take(wire.Staged(5, 1, 0), frames[:1])
    kept.take(wire.Staged(5, 1, 0), frames[1:2])
    assert kept.frames == {0: frames[1]}, "the same once more"
    kept.take(wire.Staged(5, 2, 0), frames[2:3])
    kept.take(wire.Staged(5, 1, 0), frames[3:])
    assert kept.frames == {0: frames[2]}, "what is older is not kept"
    push, last = Push(Handle(0, 0, 5, 0, 0)), memoryview(bytes(12))
    exchange = wire.Exchange((push,), None, (), "")
    assert kept.join(push, wire.Commit(exchange, 2, (0,)), [last]) == [frames[2], last]
    assert kept.join(push, wire.Commit(exchange, 2, ()), [frames[0], last]) == [frames[0], last], "what is sent wins"
    for wrong, rest in ((wire.Commit(exchange, 1, (0,)), [last]), (wire.Commit(exchange, 2, (0, 1)), [])):
        with pytest.raises(WrongFrames, match="it counts on frames that have not come"):
            kept.join(push, wrong, rest)
    kept.take(wire.Staged(6, 0, 1), [last])
    assert kept.frames == {1: last}, "a new iteration, whatever its attempt"
