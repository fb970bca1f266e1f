"""The processes beside a launcher's: a node's agent, and the driver beside rank 0.

Under `paceline host` the agent is the process the launcher has started, and starts the workers; under `torchrun
train.py` it is a child of the node's first rank, and takes the ranks for its workers. The driver is a child of rank 0.
They tell each other through the launcher's store where they are and by which keys they are known (`rendezvous.py`).
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.commands.host import GRACE_S, Host
from paceline.commands.terminal import count, print_plain
from paceline.errors import ConfigError, RunFailed, printable

if TYPE_CHECKING:
    from paceline.runtime.live.driver.children import WorkerStarter
    from paceline.runtime.live.launchers.launcher_environment import Place
    from paceline.runtime.live.multihost.agent import Agent

OPTIONS = "PACELINE_OPTIONS"
"""The environment variable with the options of a run that `paceline.init()` begins."""


class NodeAgent:
    """The agent of one node, from its registration to its end."""

    def __init__(
        self, host: Host, place: Place, number: int, agents: int, driver: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.host = host
        self.place = place
        self.number = number
        """The number of this agent; there are `agents`."""
        self.agents = agents
        self.driver = driver
        self.agent: Agent | None = None
        self.signals = 0

    def start_workers(self, script: list[str]) -> int:
        """Runs the node's workers and returns the exit code."""
        self.catch_signals(self.host_signalled)
        workers = self.host.workers
        first = self.number * workers
        agent = self.make(workers, self.host.starter(script, workers), range(first, first + workers))
        return agent.run()

    def adopt_ranks(self) -> int:
        """Is the agent of processes that the launcher has started; returns the exit code."""
        from paceline.runtime.live.launchers.adopted_processes import AGENT, adopter, await_ranks, write_pid
        from paceline.runtime.live.launchers.rendezvous import FolderThere

        def report(missing: int) -> None:
            print_plain(f"node {self.number}: still waiting for {count(missing, 'process')} to call paceline.init()")

        self.catch_signals(self.rank_gone)
        agent = self.make(self.place.local_size, adopter())
        try:
            write_pid(agent.folder.path / AGENT)
            self.store.put(f"folder-{self.number}", FolderThere(str(agent.folder.path)))
            ranks = await_ranks(agent.folder.path, self.place.local_size, self.check, report)
            agent.offer = replace(agent.offer, ranks=ranks)
        except BaseException:
            agent.close()
            raise
        return agent.run()

    def make(self, workers: int, starter: WorkerStarter, ranks: range = range(0)) -> Agent:
        """Makes an agent that knows where the driver is, and is known to the driver."""
        from paceline.runtime.live.launchers.rendezvous import AgentThere, DriverThere, RendezvousStore
        from paceline.runtime.live.messaging.remote_links import make_keys
        from paceline.runtime.live.multihost.agent import Agent, AgentOffer, new_token

        host = self.host
        keys, token = None if host.insecure else make_keys(), new_token()
        self.store = RendezvousStore(self.place, on_wait=self.check)
        self.store.put(f"agent-{self.number}", AgentThere(keys.public if keys is not None else "", token))
        driver = self.store.wait_for("driver", DriverThere, self.check)
        if driver.failed:
            raise RunFailed(f"the run could not begin: {printable(driver.failed)}")
        servers = -(-(host.servers or 1) // self.agents) if host.spread_servers else 0
        offer = AgentOffer(
            driver.address, driver.key, keys, token, workers, servers, tuple(ranks),
            advertise=host.addresses(self.place)[1], policy=host.policy,
        )  # fmt: skip
        self.agent = Agent(offer, starter, print_plain)
        return self.agent

    def check(self) -> None:
        if self.driver is not None and self.driver.poll() is not None:
            raise RunFailed("the run could not begin: see above")
        if self.signals:
            raise KeyboardInterrupt

    # Ending.

    def catch_signals(self, handle: Callable[[int, Any], None]) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, handle)

    def host_signalled(self, number: int, frame: object) -> None:
        """Ends the run when the launcher ends all processes; the driver is given time to do so."""
        self.signals += 1
        if self.signals > 1 or self.agent is None:
            self.end_now(number, frame)
            return
        if self.driver is not None and self.driver.poll() is None:
            self.driver.send_signal(signal.SIGTERM)
        signal.signal(signal.SIGALRM, self.end_now)
        signal.alarm(int(GRACE_S) + 2)

    def rank_gone(self, number: int, frame: object) -> None:
        """Ends the node's other processes when the agent's parent process has ended, and tells the driver."""
        self.signals += 1
        if self.agent is not None:
            self.agent.processes.kill()
        signal.signal(signal.SIGALRM, self.end_now)
        signal.alarm(int(GRACE_S))

    def end_now(self, number: int, frame: object) -> None:
        self.signals += 1
        if self.agent is not None:
            self.agent.end(1)

    def await_driver(self) -> int:
        """Returns the driver's exit code, once it has written the run's folder."""
        return 1 if self.driver is not None and self.driver.wait() else 0

    def end_driver(self) -> None:
        """Ends the driver, since this node's agent has failed, and with it the run."""
        if self.driver is not None and self.driver.poll() is None:
            self.driver.terminate()
            self.driver.wait()


def parent_gone(number: int, frame: object) -> None:
    """Ends the driver once. The kernel signals for each thread of the parent, and a second SIGTERM would mean: at
    once."""
    signal.signal(number, signal.SIG_IGN)
    signal.raise_signal(signal.SIGTERM)


def read_options(text: str) -> Host:
    """Reads the options of a run that `paceline.init()` begins."""
    from paceline.cli import read

    try:
        options = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{OPTIONS} cannot be read: {error}") from None
    for given in options:
        if given.split("=")[0] in ("--workers", "--restarts"):
            raise ConfigError(f"{OPTIONS}: {given} is the launcher's to say; paceline host has both")
    try:
        host: Host = read(["host", *options])
    except ConfigError as error:
        raise ConfigError(f"{OPTIONS}: {error}") from None
    return host


def main(arguments: list[str]) -> int:
    """Runs `python -m paceline.commands.launcher_processes drive|attend [--host=JSON] SCRIPT ARGUMENTS...`."""
    from paceline.runtime.live.launchers.launcher_environment import read_place
    from paceline.runtime.live.launchers.launcher_worker import DRIVE
    from paceline.runtime.live.system.process_setup import die_with

    signal.signal(signal.SIGUSR1, parent_gone)
    die_with(int(os.environ.pop("PACELINE_DRIVER")), signal.SIGUSR1)
    place = read_place(os.environ)
    assert place is not None
    part, *script = arguments
    if part == DRIVE and script[0].startswith("--host="):
        host = Host(**json.loads(script[0].removeprefix("--host=")))
        return host.drive(script[1:], place, place.size, place.size * host.workers)
    try:
        host = read_options(os.environ.get(OPTIONS, ""))
    except ConfigError:
        if part != DRIVE and place.node == 0:
            return 2  # the driver says why
        raise
    if part == DRIVE:
        return host.drive(script, place, place.nodes, place.size)
    return NodeAgent(host, place, place.node, place.nodes).adopt_ranks()


if __name__ == "__main__":
    from paceline.cli import guarded

    sys.exit(guarded(lambda: main(sys.argv[1:])))
