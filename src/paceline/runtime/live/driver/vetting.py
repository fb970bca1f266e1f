"""What an agent of another host may say and bring: only for the processes it runs. Everything else is refused.

An agent has a good key, or it would not be heard. That does not make what it passes on true: a worker speaks as itself,
in this life, and not as a server; a file belongs to a process that runs there.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from paceline.core.messages import Role
from paceline.runtime.live import wire
from paceline.runtime.live.across import dispatch
from paceline.runtime.live.across.luggage import Refused

if TYPE_CHECKING:
    from paceline.runtime.live.driver.hosts import Host

MOST = 1024
"""Processes that one agent may offer."""
LARGEST_FILE = 1 << 38
SPEAKER = re.compile(r"(worker):(\d{1,9}):(\d{1,9})|(server):(\d{1,9})")
OF_WORKERS = (
    wire.Describe, wire.Play, wire.Log, wire.Leave, wire.Rejected, wire.PeerStatus, wire.Ask, wire.Held, wire.Want,
    wire.Without,
)  # fmt: skip
OF_SERVERS = (
    wire.Ready, wire.Status, wire.Due, wire.Saved, wire.Standing, wire.Gave, wire.Finished, wire.Undurable, wire.Ask,
)  # fmt: skip
FILES = re.compile(
    r"(?P<lead>whole|average|initial-state|others)"
    r"|(?:buffers|final)-(?P<worker>\d{1,9})\.(?P<life>\d{1,9})"
    r"|(?:moved-\d{1,9}-(?P<giver>\d{1,9})-\d{1,9}|of-(?P<shard>\d{1,9})-(?:whole|average))"
    r"|checkpoint-out/shard-(?P<part>\d{1,9})\.safetensors"
    r"|trace/(?:worker|peer)-(?P<traced>\d{1,9})\.\d{1,9}\.trace"
    r"|trace/(?P<server>server)-\d{1,9}\.\d{1,9}\.trace"
)
"""Files of the run's folder that an agent may write."""


def check_offer(arrive: dispatch.Arrive) -> None:
    if not (0 <= arrive.workers <= MOST and 0 <= arrive.servers <= MOST and len(arrive.ranks) <= MOST):
        raise Refused(f"it offers {arrive.workers} workers and {arrive.servers} servers: {MOST} at most")
    if any(not 0 <= rank < 1 << 20 for rank in arrive.ranks) or len(set(arrive.ranks)) < len(arrive.ranks):
        raise Refused(f"it is for the workers {arrive.ranks}: these cannot be")


def check_file(host: Host, name: str, size: int, begun: bool) -> None:
    """Refuse a file that no process of this host may leave."""
    found = FILES.fullmatch(name)
    if found is None or not 0 <= size <= LARGEST_FILE:
        raise Refused(f"an agent may not write a file {name!r} of {size} bytes")
    is_of = {kind: int(value) for kind, value in found.groupdict().items() if value is not None and value.isdigit()}
    ranks = {(role, rank) for role, rank, _ in host.children}
    if found["lead"]:
        allowed = ("worker", 0) in ranks and not begun
    elif "worker" in is_of:
        allowed = ("worker", is_of["worker"], is_of["life"]) in host.children
    elif "traced" in is_of:
        allowed = is_of["traced"] in host.ranks
    elif found["server"]:
        allowed = host.servers > 0
    else:
        allowed = any(("server", is_of[kind]) in ranks for kind in ("giver", "shard", "part") if kind in is_of)
    if not allowed:
        raise Refused(f"the file {name!r} is of no process of {host}")


def read_said(host: Host, said: dispatch.Said) -> wire.ToDriver:
    """What a process of the host says to the driver, if it may."""
    found = SPEAKER.fullmatch(said.by)
    if found is None:
        raise Refused(f"{said.by[:40]!r} is no process")
    is_worker = found[1] is not None
    role: Role = "worker" if is_worker else "server"
    rank = int(found[2] if is_worker else found[5])
    lives = {life for other, number, life in host.children if (other, number) == (role, rank)}
    if not lives or (is_worker and int(found[3]) not in lives):
        raise Refused(f"{said.by!r} is no process of {host}")
    message = wire.decode_to_driver(said.message)
    if not isinstance(message, OF_WORKERS if is_worker else OF_SERVERS):
        raise Refused(f"a {role} says no {type(message).__name__}")
    if is_worker:
        _check_worker(message, rank, int(found[3]))
    elif getattr(message, "shard", rank) != rank:
        raise Refused(f"{said.by!r} spoke as another server")
    return message


def _check_worker(message: Any, rank: int, incarnation: int) -> None:
    """It speaks of itself, wherever it names somebody."""
    if isinstance(message, wire.Without):
        return
    spoken = [message, *getattr(message, "events", ()), *([message.message] if isinstance(message, wire.Ask) else [])]
    for each in spoken:
        named = getattr(each, "rank", getattr(each, "worker", rank))
        life = getattr(each, "incarnation", incarnation)
        if (named, life) != (rank, incarnation):
            raise Refused(f"worker {rank} spoke as worker {named}, life {life}")
