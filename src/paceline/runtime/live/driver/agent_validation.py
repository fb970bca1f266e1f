"""What an agent of another host may say and bring: only for the processes it runs. Everything else is refused.

An agent has a good key, or it would not be heard. That does not make what it passes on true: a worker speaks as itself,
in its present incarnation, and not as a server; a file belongs to a process that runs there.
"""

from __future__ import annotations

import re
from typing import Any

from paceline.core.messages import Role
from paceline.errors import ConfigError
from paceline.runtime.live.driver.remote_hosts import RemoteHost
from paceline.runtime.live.protocol import (
    agent_messages,
    lease_messages,
    resizing_messages,
    round_messages,
    script_calls,
    wire,
)
from paceline.runtime.live.storage import file_transfer
from paceline.runtime.live.storage.file_transfer import MessageRefused
from paceline.tensors import optimizer_catalogue
from paceline.tensors.layout import BORDERS, DTYPES, SLICINGS

MOST = 1024
"""Processes that one agent may offer."""
SPEAKER = re.compile(r"(worker):(\d{1,9}):(\d{1,9})|(server):(\d{1,9})")
OF_WORKERS = (
    wire.Describe, wire.Log, wire.Leave, wire.Rejected, wire.PeerStatus, wire.Ask, wire.Without,
    lease_messages.LeaseEvents, resizing_messages.Held, resizing_messages.Want,
    script_calls.LRSchedulerStates, script_calls.EndRun, script_calls.AtBarrier, round_messages.Begun,
)  # fmt: skip
OF_SERVERS = (
    wire.Ready, wire.Status, wire.Due, wire.Saved, wire.Finished, wire.Undurable, wire.Ask, wire.Measured,
    resizing_messages.Standing, resizing_messages.Gave, script_calls.Awaited,
)  # fmt: skip
FILES = re.compile(
    r"(?P<lead>whole|average|initial-state|others)"
    r"|(?:buffers|final)-(?P<worker>\d{1,9})\.(?P<incarnation>\d{1,9})"
    r"|(?:moved-\d{1,9}-(?P<giver>\d{1,9})-\d{1,9}|of-(?P<shard>\d{1,9})-(?:whole|average))"
    r"|checkpoint-out/shard-(?P<part>\d{1,9})\.safetensors"
    r"|trace/(?:worker|peer)-(?P<traced>\d{1,9})\.\d{1,9}\.(?:trace|times)"
    r"|trace/(?P<server>server)-\d{1,9}\.\d{1,9}\.(?:trace|times)"
)
"""Files of the run's folder that an agent may write."""


def check_offer(arrive: agent_messages.Arrive) -> None:
    if not (0 <= arrive.workers <= MOST and 0 <= arrive.servers <= MOST and len(arrive.ranks) <= MOST):
        raise MessageRefused(f"it offers {arrive.workers} workers and {arrive.servers} servers: {MOST} at most")
    if any(not 0 <= rank < 1 << 20 for rank in arrive.ranks) or len(set(arrive.ranks)) < len(arrive.ranks):
        raise MessageRefused(f"it is for the workers {arrive.ranks}: these cannot be")


def check_file(host: RemoteHost, name: str, size: int, begun: bool) -> None:
    """Refuse a file that no process of this host may leave."""
    found = FILES.fullmatch(name)
    if found is None or not 0 <= size <= file_transfer.LARGEST:
        raise MessageRefused(f"an agent may not write a file {name!r} of {size} bytes")
    is_of = {kind: int(value) for kind, value in found.groupdict().items() if value is not None and value.isdigit()}
    ranks = {(role, rank) for role, rank, _ in host.children}
    if found["lead"]:
        allowed = ("worker", 0) in ranks and not begun
    elif "worker" in is_of:
        allowed = ("worker", is_of["worker"], is_of["incarnation"]) in host.children
    elif "traced" in is_of:
        allowed = is_of["traced"] in host.ranks
    elif found["server"]:
        allowed = host.servers > 0
    else:
        allowed = any(("server", is_of[kind]) in ranks for kind in ("giver", "shard", "part") if kind in is_of)
    if not allowed:
        raise MessageRefused(f"the file {name!r} is of no process of {host}")


def check_described(described: wire.Describe) -> None:
    """Refuse (`ConfigError`) a model that cannot be, before memory is reserved and servers are told of it."""
    layout, optimizer = described.layout, described.optimizer
    if layout is None or optimizer is None:
        return
    optimizer_catalogue.named(optimizer.name)
    optimizer.extras.check()
    known = ((layout.dtype, DTYPES), (layout.borders, BORDERS), (layout.slicing, SLICINGS))
    if (strange := next((value for value, allowed in known if value not in allowed), None)) is not None:
        raise ConfigError(f"{strange[:40]!r} says nothing about a model's parameters")
    for entry in layout.entries:
        if not 0 <= entry.group < len(optimizer.groups) or any(size < 0 for size in entry.shape):
            raise ConfigError(
                f"{entry.name[:100]!r} has the shape {entry.shape[:9]} and group {entry.group}: impossible"
            )
    if layout.numel * layout.itemsize > file_transfer.LARGEST:
        raise ConfigError(f"a model of {layout.numel} parameters is larger than {file_transfer.LARGEST} bytes")
    optimizer.check(layout)


def read_said(host: RemoteHost, said: agent_messages.Said) -> wire.ToDriver:
    """What a process of the host says to the driver, if it may."""
    found = SPEAKER.fullmatch(said.by)
    if found is None:
        raise MessageRefused(f"{said.by[:40]!r} is no process")
    is_worker = found[1] is not None
    role: Role = "worker" if is_worker else "server"
    rank = int(found[2] if is_worker else found[5])
    incarnations = {incarnation for other, number, incarnation in host.children if (other, number) == (role, rank)}
    if not incarnations or (is_worker and int(found[3]) not in incarnations):
        raise MessageRefused(f"{said.by!r} is no process of {host}")
    message = wire.decode_to_driver(said.message)
    if not isinstance(message, OF_WORKERS if is_worker else OF_SERVERS):
        raise MessageRefused(f"a {role} says no {type(message).__name__}")
    if is_worker:
        _check_worker(message, rank, int(found[3]))
    elif getattr(message, "shard", rank) != rank:
        raise MessageRefused(f"{said.by!r} spoke as another server")
    return message


def _check_worker(message: Any, rank: int, incarnation: int) -> None:
    """It speaks of itself, wherever it names somebody."""
    if isinstance(message, wire.Without):
        return
    spoken = [
        message,
        *getattr(message, "events", ()),
        *([message.message] if isinstance(message, wire.Ask | round_messages.Begun) else []),
    ]
    spoken.append(getattr(message, "batches", None))
    for each in spoken:
        named = getattr(each, "rank", getattr(each, "worker", rank))
        named_incarnation = getattr(each, "incarnation", incarnation)
        if (named, named_incarnation) != (rank, incarnation):
            raise MessageRefused(f"worker {rank} spoke as worker {named}, incarnation {named_incarnation}")
