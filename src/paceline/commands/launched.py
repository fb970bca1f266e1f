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
from paceline.commands.hosts import print_plain
from paceline.commands.screen import count
from paceline.errors import ConfigError, RunFailed

if TYPE_CHECKING:
    from paceline.runtime.live.across.agent import Agent
    from paceline.runtime.live.across.rendezvous import Place
    from paceline.runtime.live.driver.children import StartWorker

OPTIONS = "PACELINE_OPTIONS"
"""In the environment: the options of a run that `paceline.init()` begins."""


class Part:
    """A node's agent, from its first word to its end."""

    def __init__(
        self, host: Host, place: Place, number: int, agents: int, driver: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.host = host
        self.place = place
        self.number = number
        """Of so many agents."""
        self.agents = agents
        self.driver = driver
        self.agent: Agent | None = None
        self.signals = 0

    def start_workers(self, script: list[str]) -> int:
        """Run the node's workers; the exit code."""
        from paceline.runtime.live.driver.children import script_starter

        self.catch_signals(self.host_signalled)
        workers = self.host.workers
        first = self.number * workers
        agent = self.make(
            workers, script_starter(script[0], script[1:], workers, through_driver=True), range(first, first + workers)
        )
        return agent.run()

    def adopt_ranks(self) -> int:
        """Be the agent of processes that are there; the exit code."""
        from paceline.runtime.live.across.adopting import AGENT, adopter, await_ranks, write_pid
        from paceline.runtime.live.across.rendezvous import LINE_S, FolderThere

        def tell(missing: int) -> None:
            print_plain(f"node {self.number}: still waiting for {count(missing, 'process')} to call paceline.init()")

        self.catch_signals(self.rank_gone)
        agent = self.make(self.place.local_size, adopter())
        try:
            write_pid(agent.folder.path / AGENT)
            self.board.put(f"folder-{self.number}", FolderThere(str(agent.folder.path)))
            ranks = await_ranks(agent.folder.path, self.place.local_size, self.check, tell, LINE_S)
            agent.offer = replace(agent.offer, ranks=ranks)
        except BaseException:
            agent.close()
            raise
        return agent.run()

    def make(self, workers: int, start: StartWorker, ranks: range = range(0)) -> Agent:
        """An agent that knows where the driver is, and is known there."""
        from paceline.runtime.live.across.agent import Agent, Offer, new_token
        from paceline.runtime.live.across.far import make_keys
        from paceline.runtime.live.across.rendezvous import AgentThere, Board, DriverThere

        host = self.host
        keys, token = None if host.insecure else make_keys(), new_token()
        self.board = Board(self.place, still=self.check)
        self.board.put(f"agent-{self.number}", AgentThere(keys.public if keys is not None else "", token))
        driver = self.board.wait_for("driver", DriverThere, self.check)
        if driver.failed:
            raise RunFailed(f"the run could not begin: {driver.failed}")
        servers = -(-(host.servers or 1) // self.agents) if host.spread_servers else 0
        offer = Offer(
            driver.address, driver.key, keys, token, workers, servers, tuple(ranks),
            advertise=host.addresses(self.place)[1],
        )  # fmt: skip
        self.agent = Agent(offer, start, print_plain)
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
        """The launcher ends all: the driver is given time to end the run, and says when it has."""
        self.signals += 1
        if self.signals > 1 or self.agent is None:
            self.end_now(number, frame)
            return
        if self.driver is not None and self.driver.poll() is None:
            self.driver.send_signal(signal.SIGTERM)
        signal.signal(signal.SIGALRM, self.end_now)
        signal.alarm(int(GRACE_S) + 2)

    def rank_gone(self, number: int, frame: object) -> None:
        """The process this agent is a child of has ended: so must the node's others, and the driver hears of it."""
        self.signals += 1
        for child in list(self.agent.children.values()) if self.agent is not None else ():
            child.kill()
        signal.signal(signal.SIGALRM, self.end_now)
        signal.alarm(int(GRACE_S))

    def end_now(self, number: int, frame: object) -> None:
        from paceline.runtime.live.across.dispatch import Over

        self.signals += 1
        if self.agent is not None:
            self.agent.over = Over("", 1)

    def await_driver(self) -> int:
        """The driver's exit code: it writes the run's folder when the agents have gone."""
        return 1 if self.driver is not None and self.driver.wait() else 0

    def end_driver(self) -> None:
        """This node's agent has failed, and with it the run."""
        if self.driver is not None and self.driver.poll() is None:
            self.driver.terminate()
            self.driver.wait()


def parent_gone(number: int, frame: object) -> None:
    """The kernel says so for each thread the parent has had; to a driver a second SIGTERM would mean: at once."""
    signal.signal(number, signal.SIG_IGN)
    signal.raise_signal(signal.SIGTERM)


def read_options(text: str) -> Host:
    """The options of a run that `paceline.init()` begins."""
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
    """`python -m paceline.commands.launched drive|attend [--host=JSON] SCRIPT ARGUMENTS...`, for paceline itself."""
    from paceline.runtime.live.across.beside import DRIVE
    from paceline.runtime.live.across.rendezvous import read_place
    from paceline.runtime.live.process import die_with

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
    return Part(host, place, place.node, place.nodes).adopt_ranks()


if __name__ == "__main__":
    from paceline.cli import guarded

    sys.exit(guarded(lambda: main(sys.argv[1:])))
