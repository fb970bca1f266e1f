"""Being told to end: every process of a run may be, and the driver is the one who ends it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.runtime.live.driver import shutdown_signals
from paceline.runtime.live.driver.shutdown_signals import ShutdownSignals
from paceline.runtime.live.system import process_setup
from tests.live.short_scripts import STEPS, training


@pytest.fixture
def caught() -> Iterator[ShutdownSignals]:
    """Requests to end this process, which are counted."""
    made = ShutdownSignals()
    made.catch()
    yield made
    made.restore()


def processes_of_the_run() -> list[int]:
    """But the driver."""
    driver = os.getppid()
    return [int(child) for child in Path(f"/proc/{driver}/task/{driver}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_comes_twice_within_a_moment_is_one_request(caught: ShutdownSignals, number: int, monkeypatch) -> None:
    assert not caught
    signal.raise_signal(number)
    signal.raise_signal(number)
    assert caught.count == 1
    monkeypatch.setattr(shutdown_signals, "ONCE_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_ctrl_c_twice_is_twice(caught: ShutdownSignals) -> None:
    signal.raise_signal(signal.SIGINT)
    assert caught
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_while_a_run_is_cleared_away_nothing_is_heard_and_then_all_is_as_before(caught: ShutdownSignals) -> None:
    caught.ignore()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.raise_signal(number)
    assert not caught
    caught.restore()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("policy", ["bsp", "hop:graph=ring"])
def test_servers_and_workers_leave_it_to_the_driver(policy: str, monkeypatch) -> None:
    """All are told but the driver, which ends nothing: so nothing ends."""
    monkeypatch.setattr(process_setup, "GRACE_S", 60.0)
    monkeypatch.setattr(shutdown_signals, "ONCE_S", 0.0)  # a fork that heard as the driver does would end

    def tell_all() -> None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            for child in processes_of_the_run():
                os.kill(child, number)

    run = paceline.launch(training(tell_all), workers=3, policy=policy, timeout_s=60)
    assert run.failures == []
    assert run.metrics.iterations == STEPS


def test_under_nohup_a_closed_terminal_is_nothing_to_anybody(capfd, monkeypatch) -> None:
    monkeypatch.setattr(process_setup, "GRACE_S", 0.0)

    def close_the_terminal() -> None:
        for one in (os.getppid(), *processes_of_the_run()):
            os.kill(one, signal.SIGHUP)
        time.sleep(0.1)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = paceline.launch(training(close_the_terminal), workers=2, servers=1, policy="bsp", timeout_s=60)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run.failures == []
    assert run.metrics.iterations == STEPS
    assert "stopping" not in capfd.readouterr().out


def test_a_worker_told_alone_ends_after_a_while(capfd, monkeypatch) -> None:
    monkeypatch.setattr(process_setup, "GRACE_S", 0.3)

    def be_told() -> None:
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        while time.monotonic() < began + 10:
            time.sleep(0.01)
            paceline.log(loss=time.monotonic() - began)

    run = paceline.launch(training(be_told), workers=2, policy="asp", timeout_s=60)
    assert "worker 1 was killed by SIGTERM" in capfd.readouterr().out
    assert 0.2 < max(point.loss for point in run.history) < 5


def test_what_a_script_starts_can_be_ended_as_ever(monkeypatch) -> None:
    monkeypatch.setattr(process_setup, "GRACE_S", 60.0)

    def start_and_end() -> None:
        fork = os.fork()
        if fork == 0:
            time.sleep(60)
            os._exit(0)
        started = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")
        time.sleep(0.2)
        for child in (fork, started):
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM

    run = paceline.launch(training(start_and_end), workers=2, policy="asp", timeout_s=30)
    assert run.failures == []
