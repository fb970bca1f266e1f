"""Which of a launcher's processes this one is: torchrun and Slurm say so in the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError

PORTS = (15000, 16384)
"""Under Slurm the port of the rendezvous store is the first plus the job's number modulo the second."""
MOST_NODES = 100_000


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
    """The run's name among those of this launcher."""
    master: str
    """The host of the rendezvous store."""
    port: int
    has_store: bool
    """Whether the launcher has a store there; else the run's driver, on rank 0's node, makes one."""
    attempt: int = 0
    """How often the launcher has started all processes anew."""


def read_place(environment: Mapping[str, str]) -> Place | None:
    """Returns this process's place; None if no launcher has started it."""
    if "TORCHELASTIC_RUN_ID" in environment:
        place = _of_torchrun(EnvironmentReader(environment, "torchrun"))
    elif {"SLURM_PROCID", "SLURM_STEP_ID"} <= environment.keys():  # the batch script itself has no step
        place = _of_slurm(EnvironmentReader(environment, "Slurm"))
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


class EnvironmentReader:
    """Reads what a launcher has written to the environment."""

    def __init__(self, environment: Mapping[str, str], launcher: str) -> None:
        self.environment = environment
        self.launcher = launcher

    def text(self, *names: str) -> str:
        """Returns the first of these variables that is set."""
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


def _of_torchrun(variables: EnvironmentReader) -> Place:
    return Place(
        launcher="torchrun",
        rank=variables.number("RANK"),
        size=variables.number("WORLD_SIZE", least=1),
        local_rank=variables.number("LOCAL_RANK"),
        local_size=variables.number("LOCAL_WORLD_SIZE", least=1),
        node=variables.number("GROUP_RANK"),
        nodes=variables.number("GROUP_WORLD_SIZE", least=1),
        name=variables.text("TORCHELASTIC_RUN_ID"),
        master=variables.text("MASTER_ADDR"),
        port=variables.port(),
        has_store=variables.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=variables.number("TORCHELASTIC_RESTART_COUNT"),
    )


def _of_slurm(variables: EnvironmentReader) -> Place:
    job, step = variables.number("SLURM_JOB_ID", "SLURM_JOBID"), variables.number("SLURM_STEP_ID")
    node = variables.number("SLURM_NODEID")
    nodes = variables.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", least=1)
    names = nodes_of(variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    size = variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", least=1)
    given = variables.environment
    return Place(
        launcher="Slurm",
        rank=variables.number("SLURM_PROCID"),
        size=size,
        local_rank=variables.number("SLURM_LOCALID"),
        local_size=_tasks_on(variables, node, nodes, size),
        node=node,
        nodes=nodes,
        name=f"{job}.{step}",
        master=given.get("MASTER_ADDR") or names[0],
        port=variables.port() if given.get("MASTER_PORT") else PORTS[0] + (job * 31 + step) % PORTS[1],
        has_store=False,
        attempt=variables.number("SLURM_RESTART_COUNT") if given.get("SLURM_RESTART_COUNT") else 0,
    )


def _tasks_on(variables: EnvironmentReader, node: int, nodes: int, size: int) -> int:
    """Returns how many processes of the step are on this node."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if not any(variables.environment.get(name) for name in names):
        if nodes == 1:
            return size
        return variables.number("SLURM_NTASKS_PER_NODE", least=1)
    counts = tasks_per_node(variables.text(*names))
    if node >= len(counts):
        raise ConfigError(f"Slurm says that this is node {node}, but speaks of the tasks of {len(counts)} nodes")
    return counts[node]


def tasks_per_node(text: str) -> list[int]:
    """Parses Slurm's `4(x2),3` as 4, 4, 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None or int(match[2] or 1) > MOST_NODES:
            raise ConfigError(f"{text!r} does not say how many tasks each node has, as 4(x2),3 does")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def nodes_of(text: str) -> list[str]:
    """Parses a list of nodes as Slurm writes it: `node[01-03,07],login` and the like."""
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
    """Parses `01-03,07` as 01, 02, 03, 07; empty if it is nothing of the kind."""
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
