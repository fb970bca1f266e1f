"""Lines and hosts that fail for a while: a short while changes nothing, after a long one all come back by themselves.

`test_faults.py` has the ten seconds of one host, and what never comes back.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from paceline.bench.hosts.netns import Hosts
from paceline.core.actions import Apply
from paceline.core.messages import Handle
from paceline.core.trace import read_records
from paceline.run import Run
from tests.hosts.running import Serving
from tests.hosts.test_faults import PACED, check_applied_once
from tests.reference import largest_difference, train_alone

FOREVER = 1_000_000
"""Iterations of a run that is interrupted when it has shown enough."""
ITERATIONS = 40
"""Of a run that is compared with training in one process."""
SSP = ("--policy", "ssp:staleness=3", *PACED)

pytestmark = pytest.mark.timeout(240)


@contextmanager
def served(folder: Path, workers: tuple[int, ...], *options: str, iterations: int) -> Iterator[tuple[Hosts, Serving]]:
    """A run with two servers on host 0 and so many workers on each of the hosts 1, 2, ...; ranks are in that order."""
    shape = ("--servers", "2", "--workers", str(sum(workers)))
    with (
        Hosts(1 + len(workers), share=folder) as hosts,
        Serving(hosts[0], folder, *shape, *options) as serving,
    ):
        for host, count in zip(hosts[1:], workers, strict=True):
            serving.fork(host, host.name, count, iterations)
            serving.until(lambda host=host: f"host {host.name}/" in serving.log("serve"), f"{host.name} is there", 100)
        yield hosts, serving


def applied(serving: Serving) -> list[tuple[float, Handle]]:
    """What server 0 has applied by now and when, from the trace that grows on its host."""
    found = []
    for path in sorted(serving.host.path("/dev/shm").glob("paceline-*/trace/server-0.*.trace")):
        for record in read_records(path.read_bytes()):
            actions = (action for action in record.actions if isinstance(action, Apply))
            found += [(record.event.at, handle) for action in actions for handle in action.handles]
    return found


def until_pushed(serving: Serving, rank: int, count: int, incarnation: int = 0) -> None:
    def often_enough() -> bool:
        handles = [handle for _, handle in applied(serving)]
        return sum((handle.source, handle.incarnation) == (rank, incarnation) for handle in handles) >= count

    serving.until(often_enough, f"worker {rank}, incarnation {incarnation}, has pushed {count} times", 100)


def interrupt(serving: Serving) -> Run:
    """As a person does who has seen enough. Everybody ends well."""
    serving.server.send_signal(signal.SIGINT)
    run = serving.end()
    check_applied_once(run)
    return run


@pytest.mark.long
def test_a_cut_that_nobody_notices_changes_nothing(tmp_path: Path) -> None:
    """Shorter than the detection time: TCP sends again what was lost, and BSP is what it is in one process."""
    with served(tmp_path, (1, 1), "--policy", "bsp", *PACED, iterations=ITERATIONS) as (hosts, serving):
        for number in range(3):
            until_pushed(serving, 0, 1 + 10 * number)
            hosts[1 + number % 2].cut()
            time.sleep(0.7)
            hosts[1 + number % 2].heal()
        run = serving.end()
    check_applied_once(run)
    assert "given up" not in serving.log("serve")
    alone = train_alone("digits-mlp", 2, ITERATIONS, "sgd:lr=0.1", torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5


@pytest.mark.long
def test_a_slow_and_lossy_line_changes_nothing_but_the_time(tmp_path: Path) -> None:
    with served(tmp_path, (1, 1), "--policy", "bsp", iterations=ITERATIONS) as (hosts, serving):
        hosts[2].slow(delay_ms=5, rate_mbit=50, loss=0.02, seed=0)
        run = serving.end()
    check_applied_once(run)
    assert "given up" not in serving.log("serve")
    alone = train_alone("digits-mlp", 2, ITERATIONS, "sgd:lr=0.1", torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5


@pytest.mark.long
def test_a_frozen_host_comes_back_when_it_thaws(tmp_path: Path) -> None:
    with served(tmp_path, (2, 1), *SSP, iterations=FOREVER) as (hosts, serving):
        until_pushed(serving, 2, 10)
        frozen = hosts[2].processes()
        for process in frozen:
            os.kill(process, signal.SIGSTOP)
        serving.until(lambda: "given up" in serving.log("serve"), "the silence is noticed", 10)
        so_far = len(applied(serving))
        serving.until(lambda: len(applied(serving)) > so_far + 30, "the others go on", 10)
        for process in frozen:
            os.kill(process, signal.SIGCONT)
        until_pushed(serving, 2, 10, incarnation=1)
        interrupt(serving)


@pytest.mark.long
def test_all_come_back_when_the_servers_were_cut_off(tmp_path: Path) -> None:
    with served(tmp_path, (1, 1), *SSP, iterations=FOREVER) as (hosts, serving):
        for rank in range(2):
            until_pushed(serving, rank, 10)
        hosts[0].cut()
        serving.until(lambda: serving.log("serve").count("given up") == 2, "both hosts are given up", 10)
        hosts[0].heal()
        for rank in range(2):
            until_pushed(serving, rank, 10, incarnation=1)
        interrupt(serving)
