"""Where a launcher has put this process, and how the processes of its run find each other.

torchrun and Slurm start the processes of all nodes and tell each its place by its environment. A store of
torch.distributed, torchrun's own or under Slurm one beside the first rank, then says what nobody can know before:
addresses, public keys, and which folder a node's processes meet in. Nothing else passes through it, and once the run
has begun nobody asks it any more.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import msgspec
from msgspec import Struct

from paceline.errors import ConfigError, RunFailed

PATIENCE_S = 300.0
"""How long the store may take to be there."""
ASK_S = 0.1
LINE_S = 30.0
"""After so long a person is told who is waited for."""
PORTS = (15000, 16384)
"""Under Slurm the store's port is the first and the job's number modulo the second."""
MOST_NODES = 100_000
T = TypeVar("T", bound=Struct)


@dataclass(frozen=True)
class Place:
    """One of a launcher's processes."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    name: str
    """Of the run, among those of this launcher."""
    master: str
    """Where the store is, and its port."""
    port: int
    has_store: bool
    """Whether the launcher has one there; else the run's driver, beside rank 0, makes one."""
    attempt: int = 0
    """How often the launcher has started all processes anew."""


def read_place(environment: Mapping[str, str]) -> Place | None:
    """This process's place; None if no launcher has started it."""
    if "TORCHELASTIC_RUN_ID" in environment:
        place = _of_torchrun(_Reader(environment, "torchrun"))
    elif {"SLURM_PROCID", "SLURM_STEP_ID"} <= environment.keys():  # the batch script itself has no step
        place = _of_slurm(_Reader(environment, "Slurm"))
    else:
        return None
    for what, number, count in (
        ("rank", place.rank, place.size),
        ("local rank", place.local_rank, place.local_size),
        ("node", place.node, place.nodes),
    ):
        if number >= count:
            raise ConfigError(f"{place.launcher} says that this is {what} {number} of {count}, which cannot be")
    return place


class _Reader:
    """Reads what a launcher has said."""

    def __init__(self, environment: Mapping[str, str], launcher: str) -> None:
        self.environment = environment
        self.launcher = launcher

    def text(self, *names: str) -> str:
        """The first of these that is there."""
        for name in names:
            if self.environment.get(name):
                return self.environment[name]
        raise ConfigError(f"{self.launcher} has started this process, but has not set {names[0]}")

    def number(self, *names: str, least: int = 0) -> int:
        text = self.text(*names)
        if not text.isdecimal() or int(text) < least:
            name = next(name for name in names if self.environment.get(name))
            raise ConfigError(f"{name}={text!r}, which {self.launcher} has set, is no number from {least} on")
        return int(text)

    def port(self) -> int:
        port = self.number("MASTER_PORT", least=1)
        if port > 65535:
            raise ConfigError(f"MASTER_PORT={port} is no port: 1 to 65535")
        return port


def _of_torchrun(said: _Reader) -> Place:
    return Place(
        launcher="torchrun",
        rank=said.number("RANK"),
        size=said.number("WORLD_SIZE", least=1),
        local_rank=said.number("LOCAL_RANK"),
        local_size=said.number("LOCAL_WORLD_SIZE", least=1),
        node=said.number("GROUP_RANK"),
        nodes=said.number("GROUP_WORLD_SIZE", least=1),
        name=said.text("TORCHELASTIC_RUN_ID"),
        master=said.text("MASTER_ADDR"),
        port=said.port(),
        has_store=said.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=said.number("TORCHELASTIC_RESTART_COUNT"),
    )


def _of_slurm(said: _Reader) -> Place:
    job, step = said.number("SLURM_JOB_ID", "SLURM_JOBID"), said.number("SLURM_STEP_ID")
    node = said.number("SLURM_NODEID")
    nodes = said.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", least=1)
    names = nodes_of(said.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    size = said.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", least=1)
    given = said.environment
    return Place(
        launcher="Slurm",
        rank=said.number("SLURM_PROCID"),
        size=size,
        local_rank=said.number("SLURM_LOCALID"),
        local_size=_tasks_on(said, node, nodes, size),
        node=node,
        nodes=nodes,
        name=f"{job}.{step}",
        master=given.get("MASTER_ADDR") or names[0],
        port=said.port() if given.get("MASTER_PORT") else PORTS[0] + (job * 31 + step) % PORTS[1],
        has_store=False,
        attempt=said.number("SLURM_RESTART_COUNT") if given.get("SLURM_RESTART_COUNT") else 0,
    )


def _tasks_on(said: _Reader, node: int, nodes: int, size: int) -> int:
    """How many processes of the step are on this node."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if not any(said.environment.get(name) for name in names):
        if nodes == 1:
            return size
        return said.number("SLURM_NTASKS_PER_NODE", least=1)
    counts = tasks_per_node(said.text(*names))
    if node >= len(counts):
        raise ConfigError(f"Slurm says that this is node {node}, but speaks of the tasks of {len(counts)} nodes")
    return counts[node]


def tasks_per_node(text: str) -> list[int]:
    """`4(x2),3` is 4, 4, 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None or int(match[2] or 1) > MOST_NODES:
            raise ConfigError(f"{text!r} does not say how many tasks each node has, as 4(x2),3 does")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def nodes_of(text: str) -> list[str]:
    """The names in a list of nodes as Slurm writes it: `node[01-03,07],login` and the like."""
    wrong = ConfigError(f"{text!r} is no list of nodes, as node[01-03,07] is")
    parts = re.findall(r"((?:[^,\[\]\s]|\[[^\[\]]*\])+)(?:,|$)", text)
    if ",".join(parts) != text or not parts:
        raise wrong
    names: list[str] = []
    for part in parts:
        made = [""]
        for fixed, choices in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            ends = [fixed] if fixed else _choices(choices)
            if not ends or len(made) * len(ends) > MOST_NODES:
                raise wrong
            made = [beginning + end for beginning in made for end in ends]
        names += made
    return names


def _choices(text: str) -> list[str]:
    """`01-03,07` is 01, 02, 03, 07. Empty if it is nothing of the kind."""
    found: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            return []
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + MOST_NODES:
            return []
        found += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return found


class DriverThere(Struct, frozen=True):
    """Where the driver is; or why there will be none."""

    address: str = ""
    key: str = ""
    failed: str = ""


class AgentThere(Struct, frozen=True):
    """By which key and name an agent will come."""

    key: str
    token: str


class FolderThere(Struct, frozen=True):
    """Where the processes of a node, or a run that is started anew, find their files."""

    path: str


class Board:
    """The store, as a place for notes."""

    def __init__(self, place: Place, make: bool = False, still: Callable[[], None] = lambda: None) -> None:
        """`make` it, if the launcher has none; else wait until it answers, calling `still` meanwhile."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        make = make and not place.has_store
        if not make:
            await_listener(place, still)
        try:
            self.store = TCPStore(
                place.master, place.port, is_master=make, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S)
            )
        except RuntimeError as error:
            raise ConfigError(f"no store at {place.master}:{place.port}: {str(error).splitlines()[0]}") from None
        self.place = place
        self.lasting = PrefixStore(f"paceline/{place.name}", self.store)
        self.notes = PrefixStore(f"attempt-{place.attempt}", self.lasting)
        """Of this attempt; what `lasting` has is there in the next one too, if the launcher keeps the store."""

    def put(self, name: str, note: Struct, lasting: bool = False) -> None:
        (self.lasting if lasting else self.notes).set(name, msgspec.json.encode(note).decode())

    def read(self, name: str, kind: type[T], lasting: bool = False) -> T | None:
        store = self.lasting if lasting else self.notes
        if not store.check([name]):
            return None
        try:
            return msgspec.json.decode(store.get(name), type=kind)
        except msgspec.MsgspecError as error:
            raise RunFailed(f"the store's {name} is not what it should be: {error}") from None

    def wait_for(
        self,
        name: str,
        kind: type[T],
        still: Callable[[], None] = lambda: None,
        tell: Callable[[], None] = lambda: None,
    ) -> T:
        """What is there under this name once it is; `still` is called meanwhile, `tell` once if it takes long."""
        began = time.monotonic()
        told = False
        while (note := self.read(name, kind)) is None:
            still()
            if not told and time.monotonic() - began > LINE_S:
                told = True
                tell()
            time.sleep(ASK_S)
        return note


def await_listener(place: Place, still: Callable[[], None]) -> None:
    """Return when the store's port answers."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection((place.master, place.port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                where = f"{place.master}:{place.port}"
                raise ConfigError(f"rank 0 of {place.launcher} does not answer at {where}: {error}") from None
        still()
        time.sleep(ASK_S)
