"""What an agent of another host may say and bring: only for the processes it runs."""

from __future__ import annotations

import pytest

from paceline.core.sample_dispatch import LeaseRequested
from paceline.runtime.live.driver import agent_validation
from paceline.runtime.live.driver.remote_hosts import RemoteChild, RemoteHost
from paceline.runtime.live.messaging.reliable_channel import ReliableChannel
from paceline.runtime.live.protocol import agent_messages, lease_messages, wire
from paceline.runtime.live.protocol.configuration import Endpoint
from paceline.runtime.live.storage.file_transfer import MessageRefused


@pytest.fixture
def host() -> RemoteHost:
    """It runs workers 0 and 3, the latter in its third life, and server 1."""
    made = RemoteHost(b"host:x", "x", ReliableChannel("", lambda message, frames: None), servers=1, ranks=[0, 3])
    for number, process in enumerate((("worker", 0, 0), ("worker", 3, 2), ("server", 1, 0))):
        made.children[process] = RemoteChild(*process, made, number)  # type: ignore[index, arg-type]
    return made


@pytest.mark.parametrize(
    "name",
    ["others", "buffers-3.2", "final-0.0", "moved-1-1-0", "of-1-whole", "checkpoint-out/shard-1.safetensors",
     "trace/worker-3.1.trace", "trace/peer-0.0.trace", "trace/server-1.0.trace"],
)  # fmt: skip
def test_files_of_its_own_processes(host: RemoteHost, name: str) -> None:
    agent_validation.check_file(host, name, 10, begun=False)


@pytest.mark.parametrize(
    "name",
    ["config", "driver", "nonce", "lock", "key-0.0", "worker-0.0", "buffers-3.1", "final-1.0", "moved-1-0-1",
     "of-0-whole", "checkpoint-out/shard-0.safetensors", "trace/worker-2.0.trace", "../whole", "trace/../x"],
)  # fmt: skip
def test_no_files_of_others(host: RemoteHost, name: str) -> None:
    with pytest.raises(MessageRefused):
        agent_validation.check_file(host, name, 10, begun=False)


def test_nobody_changes_the_first_values_of_a_run_that_has_begun(host: RemoteHost) -> None:
    with pytest.raises(MessageRefused):
        agent_validation.check_file(host, "whole", 10, begun=True)


def said(by: str, message: wire.ToDriver) -> agent_messages.Said:
    return agent_messages.Said(by, wire.encode(message))


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("worker:3:2", wire.Leave(3, 2)),
        ("worker:3:2", lease_messages.LeaseEvents(3, 2, 0, 10, 0, (LeaseRequested(0.0, 3, 2, 0, 0, 1),))),
        ("worker:3:2", wire.Without(7, 0)),
        ("server:1", wire.Ready(1, True, Endpoint(0))),
        ("server:1", wire.Due()),
    ],
)
def test_a_process_speaks_for_itself(host: RemoteHost, by: str, message: wire.ToDriver) -> None:
    assert agent_validation.read_said(host, said(by, message)) == message


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("worker:3:1", wire.Leave(3, 1)),
        ("worker:3:2", wire.Leave(3, 77)),
        ("worker:3:2", wire.Leave(0, 0)),
        ("worker:1:0", wire.Leave(1, 0)),
        ("worker:3:2", wire.Ready(3, True, Endpoint(0))),
        ("worker:3:2", wire.Rejected(0, 1, "")),
        ("worker:3:2", lease_messages.LeaseEvents(3, 2, 0, 10, 0, (LeaseRequested(0.0, 0, 0, 0, 0, 1),))),
        ("server:1", wire.Ready(0, True, Endpoint(0))),
        ("server:1", wire.Leave(1, 0)),
        ("server:0", wire.Due()),
        ("worker:" + "9" * 5000 + ":0", wire.Due()),
        ("driver", wire.Due()),
    ],
)
def test_and_not_for_others(host: RemoteHost, by: str, message: wire.ToDriver) -> None:
    with pytest.raises(MessageRefused):
        agent_validation.read_said(host, said(by, message))


def test_offers_have_bounds() -> None:
    for workers, servers, ranks in ((10**9, 0, ()), (-1, 0, ()), (1, 10**9, ()), (1, 0, (-1,)), (2, 0, (1, 1))):
        with pytest.raises(MessageRefused):
            agent_validation.check_offer(agent_messages.Arrive("h", workers, servers, ranks))
    agent_validation.check_offer(agent_messages.Arrive("h", 4, 1, (4, 5, 6, 7)))
