"""A run on a Ray cluster: Ray places the processes and starts them again, paceline does everything else.

Each worker and each server has a bundle of one placement group and an actor in it, which is an agent with one place
(`multihost/agent.py`). Little goes through Ray: the driver's address and public key, the script's name, and back the
public key of each agent, by which the driver knows it. Gradients, parameters and orders take paceline's own way. When
an actor's process or its node is lost, Ray starts the actor elsewhere; it has new keys, is enrolled anew, and its
worker comes back as a new incarnation, its server from the last checkpoint.

This is the one file that knows Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.core.messages import Members, Role
from paceline.errors import ConfigError, PacelineError, RunFailed
from paceline.runtime.live.driver.run_plan import OpenRun
from paceline.runtime.live.driver.script_workers import script_starter
from paceline.runtime.live.messaging.remote_links import make_keys
from paceline.runtime.live.multihost.agent import Agent, AgentOffer, new_token
from paceline.runtime.live.protocol import agent_messages

NAMESPACE = "paceline"
LOOK_S = 0.2
"""How often the driver looks for answers of Ray."""
CONNECT_S = 5.0
STORE_BYTES = 80_000_000
"""The object store of a cluster that is started here: next to nothing goes through Ray."""
END_S = 5.0
"""How long actors may take to end by themselves."""


@dataclass(frozen=True)
class Wanted:
    """The resources that a run asks of the cluster."""

    members: Members
    worker: dict[str, float]
    """The resources of each worker, as {"CPU": 1, "GPU": 1}."""
    server: dict[str, float]
    strategy: str
    """SPREAD: over as many nodes as there are; PACK: on as few as possible."""
    timeout_s: float

    @property
    def bundles(self) -> list[dict[str, float]]:
        return [self.worker] * self.members.workers + [self.server] * self.members.servers

    def __str__(self) -> str:
        return in_words({name: sum(bundle.get(name, 0) for bundle in self.bundles) for name in ("CPU", "GPU")})


@dataclass(frozen=True)
class WorkerScript:
    """The script of the workers, and the folder on each node that it runs in."""

    path: str
    arguments: tuple[str, ...]
    folder: str
    """"" for the folder that Ray has brought there."""
    policy: str | None = None
    """The policy of the command line, if it has one."""
    preload: tuple[str, ...] = ()
    """Modules to be imported before workers are forked."""
    fresh: bool = False
    """Whether each worker is to be a fresh interpreter instead."""


class ScriptFailed(PacelineError):
    """The script of a worker has failed; the message is the end of what it printed."""


class AgentActor:
    """A Ray actor: an agent with a place for one process of the run."""

    def __init__(self) -> None:
        self.keys = make_keys()
        self.token = new_token()

    def introduce(self) -> tuple[str, str]:
        """Returns the public key by which the driver is to know this agent, and its name."""
        return self.keys.public, self.token

    def run(self, address: str, server_key: str, role: Role, rank: int, script: WorkerScript) -> None:
        """Serves until the run is over."""
        if script.folder and Path(script.folder).is_dir():
            os.chdir(script.folder)
        path = Path(script.path).absolute()
        if role == "worker" and not path.is_file():
            raise ConfigError(
                f"there is no script {script.path!r} on {own_address()}: name a folder to bring there "
                "(--working-dir), or run from one that all nodes share"
            )
        workers = int(role == "worker")
        offer = AgentOffer(
            address, server_key, self.keys, self.token, workers, 1 - workers, (rank,), policy=script.policy
        )

        def say(line: str) -> None:
            sys.stdout.write(f"{line}\n")  # Ray shows an actor's output
            sys.stdout.flush()

        starter = script_starter([str(path), *script.arguments], 1, preload=script.preload, fresh=script.fresh)
        agent = Agent(offer, starter, say)
        agent.run()
        if agent.processes.failure:
            raise ScriptFailed(agent.processes.failure)


class PlacedActor:
    """The actor of one process of the run, as the driver sees it."""

    def __init__(self, role: Role, rank: int, actor: Any) -> None:
        self.role = role
        self.rank = rank
        self.actor = actor
        self.token = ""
        """The name of the actor's agent; "" until it is known."""
        self.call: Any = actor.introduce.remote()
        """The call that Ray has not answered yet; None if none is expected to be any more."""
        self.runs = False
        """Whether that call is of `run`, not of `introduce`."""

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"

    @property
    def name(self) -> bytes:
        return b"host:" + self.token.encode()


class OnRay:
    """The processes of a run on a Ray cluster, for the length of a `with`. The driver calls `opened` and `tick`."""

    def __init__(self, wanted: Wanted, script: WorkerScript, address: str, working_dir: str | None) -> None:
        self.wanted = wanted
        self.script = script
        self.address = address
        self.working_dir = working_dir
        self.run = secrets.token_hex(3)
        self.group: PlacementGroup | None = None
        self.placed: list[PlacedActor] = []
        self.looked_s = 0.0
        self.driven: OpenRun

    # Beginning.

    def __enter__(self) -> OnRay:
        connect(self.address, self.working_dir)
        try:
            self._place()
        except BaseException:
            self.close()
            raise
        return self

    def _place(self) -> None:
        wanted = self.wanted
        self.group = placement_group(wanted.bundles, strategy=wanted.strategy, name=f"paceline-{self.run}")
        if not self.group.wait(timeout_seconds=wanted.timeout_s):
            members = wanted.members
            raise ConfigError(
                f"Ray found no place for {counted(members.workers, 'worker')} and {counted(members.servers, 'server')} "
                f"within {wanted.timeout_s:g} s: {wanted} asked ({in_words(wanted.worker)} for each worker, "
                f"{in_words(wanted.server)} for each server), the cluster has {in_words(ray.cluster_resources())}, "
                f"{in_words(ray.available_resources())} free now"
            )

    def opened(self, driven: OpenRun) -> None:
        """Starts the actors, now that the driver listens."""
        self.driven = driven
        members = self.wanted.members
        processes: list[tuple[Role, int]] = [("worker", rank) for rank in range(members.workers)]
        processes += [("server", rank) for rank in range(members.servers)]
        for bundle, (role, rank) in enumerate(processes):
            resources = self.wanted.bundles[bundle]
            actor = ray.remote(AgentActor).options(
                name=self._name(role, rank),
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, bundle),
            )
            self.placed.append(PlacedActor(role, rank, actor.remote()))
        nodes = len(set(ray.util.placement_group_table(self.group)["bundles_to_node_id"].values()))
        driven.say(f"placed on {counted(nodes, 'node')} of Ray; its actors: paceline-{self.run}-*")

    def _name(self, role: Role, rank: int) -> str:
        """The name of an actor, for Ray's own tools."""
        return f"paceline-{self.run}-{role}-{rank}"

    # Meanwhile.

    def tick(self) -> None:
        """Takes what Ray has answered, without waiting for it."""
        if time.monotonic() - self.looked_s < LOOK_S:
            return
        self.looked_s = time.monotonic()
        asked = {placed.call: placed for placed in self.placed if placed.call is not None}
        ready = ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else []
        for call in ready:
            self._take(asked[call])
        for placed in self.placed:
            self._let_go(placed)

    def _take(self, placed: PlacedActor) -> None:
        """Takes Ray's answer to a call."""
        try:
            answer = ray.get(placed.call)
        except ActorDiedError as error:
            self._ended(placed, error)
        except RayActorError:
            if placed.runs:  # while it is not there again Ray says the same of each question
                self.driven.say(f"Ray has lost the actor of {placed} and starts it again")
            placed.call, placed.runs = placed.actor.introduce.remote(), False
        except RayError as error:
            self._ended(placed, error)
        else:
            placed.call = None
            if not placed.runs:
                self._enrol(placed, *answer)

    def _enrol(self, placed: PlacedActor, key: str, token: str) -> None:
        hosts = self.driven.hosts
        hosts.enrol(key, token)
        keys = hosts.meeting.keys
        assert keys is not None
        placed.token, placed.runs = token, True
        placed.call = placed.actor.run.remote(hosts.address, keys.public, placed.role, placed.rank, self.script)

    def _ended(self, placed: PlacedActor, error: Exception) -> None:
        """An actor's call has failed for good: for a server's, or before all are there, the run ends."""
        placed.call = None
        driven = self.driven
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, ScriptFailed):  # the driver has said that it did
            driven.say(f"Ray shows why {placed} failed: the call of {self._name(placed.role, placed.rank)}")
            return
        why = f"{placed}: {cause if isinstance(cause, PacelineError) else str(error).splitlines()[-1].strip()}"
        if not driven.state.begun or (placed.role == "server" and not driven.state.finishing):
            raise ConfigError(why) if isinstance(cause, ConfigError) else RunFailed(why)
        driven.say(f"the actor of {why}")

    def _let_go(self, placed: PlacedActor) -> None:
        """Has the call of a worker that failed and is not restarted fail, so that Ray shows it."""
        host = self.driven.hosts.hosts.get(placed.name)
        if host is None or host.last_code <= 0 or host.children or placed.role == "server":
            return
        if self.driven.may_start(placed.rank):
            return
        host.last_code = 0
        host.say(agent_messages.Over("its script has failed", 1))

    # Ending.

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves nothing in the cluster: agents that have not heard that the run is over are killed."""
        try:
            calls = [placed.call for placed in self.placed if placed.call is not None and placed.runs]
            if calls:
                ray.wait(calls, num_returns=len(calls), timeout=END_S)
            for placed in self.placed:
                ray.kill(placed.actor)
            if self.group is not None:
                remove_placement_group(self.group)
        finally:
            ray.shutdown()


def connect(address: str, working_dir: str | None) -> None:
    """Joins an existing cluster, or starts one on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that is begun here
    given: dict[str, Any] = {"namespace": NAMESPACE, "logging_level": logging.ERROR}
    if working_dir is not None:
        given["runtime_env"] = {"working_dir": working_dir}
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    try:
        if address == "auto":
            with contextlib.suppress(ConnectionError):
                ray.init(address=address, **given)
                return
        elif address != "local":
            check_listens(address)
            ray.init(address=address, **given)
            return
        ray.init(address="local", include_dashboard=False, object_store_memory=STORE_BYTES, **given)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"no Ray cluster ({address}): {str(error).strip().splitlines()[0]}") from None


def check_listens(address: str) -> None:
    """Refuses an address where nobody listens: Ray would try it for ever."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--ray-address {address} is neither auto nor local nor HOST:PORT")
    with socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=CONNECT_S):
        pass


def own_address() -> str:
    """Returns the address by which nodes of the cluster reach this process."""
    return str(ray.util.get_node_ip_address())


def in_words(resources: dict[str, float]) -> str:
    """Counts CPUs and GPUs, as in: 4 CPUs and 1 GPU."""
    counts = {name: resources.get(name, 0) for name in ("CPU", "GPU")}
    return " and ".join(counted(count, name) for name, count in counts.items() if count or name == "CPU")


def counted(count: float, what: str) -> str:
    return f"{count:g} {what}{'' if count == 1 else 's'}"
