"""`paceline serve` and `paceline join`: a run whose workers come from any machine, at any time."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.text import Text

from paceline.api import check_count
from paceline.commands.options import File, Flag, Maybe, WorkerStart
from paceline.commands.run import Live, Start, check_script
from paceline.commands.terminal import console, count, print_plain
from paceline.errors import ConfigError, RunFailed

if TYPE_CHECKING:
    from paceline.runtime.live.driver.children import WorkerStarter
    from paceline.runtime.live.driver.driver import RunPlan
    from paceline.runtime.live.driver.run_plan import OpenRun
    from paceline.runtime.live.messaging.remote_links import RemoteLink

LOOPBACK = ("127.", "localhost", "[::1]")
REQUEST_S = 1.0
INSECURE = (
    "INSECURE: no keys and no encryption. Whoever reaches this network can read the model, change it and stop the run."
)


@dataclass(kw_only=True)
class Serve(Live):
    """Hold a run's parameters for workers of other machines: paceline serve --servers 2 --bind tcp://0.0.0.0:7000

    It prints the line to join with; the run begins when --workers have joined, and more may come at any time. It ends
    when the last has ended, and leaves a folder as `paceline run` does. Whoever has the key file may join: copy it by a
    safe way (scp), and to nobody else.
    """

    workers: int = 1
    """The run begins when so many have joined."""
    bind: str = "tcp://0.0.0.0:7000"
    """Where to listen for those who join. Servers take ports of their own (--ports)."""
    advertise: Maybe[str] = None
    """The address of this machine that others are to use, if it is not the one it listens on."""
    ports: Maybe[str] = None
    """The ports servers may take, and peers on each machine, as 7001-7016; any free ones if none."""
    key_file: str = "paceline.key"
    """Where the run's key is written (mode 0600)."""
    insecure: Flag = False
    """No keys and no encryption: whoever reaches a port takes part. Only in a network you trust."""
    wire: str = "float32"
    """How floats travel to other machines: float32 (as they are), bfloat16 or float16 (half the bytes), int8 (a
    quarter), int4 (a seventh), topk:share=0.01 (the largest only, a hundredth); with error feedback but for float32."""

    def main(self, script: list[str], start: Start | None = None) -> int:
        if script:
            raise ConfigError(f"serve runs no script: {script[0]!r} belongs to paceline join")
        return self.run(["serve"], start)

    def starter(self, script: list[str], workers: int, merged: bool = True) -> WorkerStarter:
        from paceline.runtime.live.driver.children import Child, WorkerStarter

        def start(rank: int, incarnation: int, folder: Path) -> Child:
            raise RunFailed(f"worker {rank} cannot be started here: it comes from another machine")

        return WorkerStarter(start)

    def plan(self, script: list[str]) -> RunPlan:
        from paceline.runtime.live.driver.remote_hosts import Meeting
        from paceline.runtime.live.messaging.addresses import routable
        from paceline.runtime.live.messaging.remote_links import make_keys
        from paceline.runtime.live.protocol.configuration import MultihostOptions
        from paceline.tensors.wire_precision import check_wire

        host, port = read_address(self.bind)
        check_wire(self.wire)
        check_advertised(self.advertise)
        advertise = self.advertise or routable(host)
        keys = None if self.insecure else make_keys()
        self.join_keys = None if self.insecure else make_keys()
        if self.insecure:
            warn_insecure(host)
        meeting = Meeting(host, port, advertise, keys, self.join_keys.public if self.join_keys is not None else "")
        multihost = MultihostOptions(host, advertise, read_ports(self.ports), not self.insecure, self.wire)
        return replace(super().plan(script), meeting=meeting, multihost=multihost, opened=self.print_how_to_join)

    def print_how_to_join(self, run: OpenRun) -> None:
        from paceline.runtime.live.messaging.key_files import KeyFile, write_key_file

        hosts = run.hosts
        how = f"paceline join {hosts.address}"
        if self.join_keys is None or hosts.meeting.keys is None:
            how += " --insecure"
        else:
            if Path(self.key_file).exists():
                console.print(f"{self.key_file} was another run's and is replaced: copies of it are of no use any more")
            write_key_file(Path(self.key_file), KeyFile(hosts.address, hosts.meeting.keys.public, self.join_keys))
            how += f" --key-file {self.key_file}"
        console.print(f"waiting for {count(self.workers, 'worker')}: {how} SCRIPT.py", soft_wrap=True)


@dataclass(kw_only=True)
class Join(WorkerStart):
    """Take part in a run of another machine: paceline join tcp://HOST:PORT --key-file paceline.key SCRIPT.py

    The script, and what stands after it, is what `paceline run` would take. If this machine is out of reach for a while
    the others go on without it; when it is back its workers start again with the run's present parameters.
    """

    address: Annotated[str, tyro.conf.Positional]
    """Where the run is, as `paceline serve` says."""
    key_file: File = None
    """The run's key file."""
    workers: int = 1
    """How many processes run the script here."""
    insecure: Flag = False
    """Join a run that has no keys."""
    patience_s: float = 60.0
    """Give up when nothing is heard of the run for so long."""

    def main(self, script: list[str]) -> int:
        from paceline.runtime.live.messaging.key_files import read_key_file
        from paceline.runtime.live.messaging.remote_links import RemoteLink, make_keys
        from paceline.runtime.live.multihost.agent import Agent, AgentOffer, new_token

        check_count("workers", self.workers)
        check_script(script, "join")
        host, _ = read_address(self.address)
        if self.key_file is None and not self.insecure:
            raise ConfigError("name the run's key file: --key-file FILE (or --insecure, if the run has no keys)")
        token, keys, connect, server_key = new_token(), None, None, ""
        if self.key_file is not None:
            key_file, keys = read_key_file(Path(self.key_file)), make_keys()
            server_key = key_file.server
            if key_file.address != self.address:
                console.print(f"note: {self.key_file} is of a run at {key_file.address}, not {self.address}")
            connect = ConnectionProgress(
                RemoteLink(self.address, b"join", key_file.client, server_key), keys.public, token
            )
        else:
            warn_insecure(host)
        offer = AgentOffer(self.address, server_key, keys, token, self.workers, patience_s=self.patience_s)
        try:
            return Agent(offer, self.starter(script, self.workers), print_plain, connect or (lambda: None)).run()
        finally:
            if connect is not None:
                connect.link.close()


class ConnectionProgress:
    """Registers this host by a key of its own, with the run's key, and tries again until it has succeeded."""

    def __init__(self, link: RemoteLink, key: str, token: str) -> None:
        from paceline.runtime.live.protocol.agent_messages import ConnectRequest, encode

        self.link = link
        self.message = encode(ConnectRequest(key, token))
        self.said_s = 0.0

    def __call__(self) -> None:
        if time.monotonic() - self.said_s > REQUEST_S:
            self.said_s = time.monotonic()
            if self.link.gone:
                self.link.reopen()
            self.link.receive()
            self.link.send(self.message)


def read_address(text: str) -> tuple[str, int]:
    host, colon, port = text.removeprefix("tcp://").rpartition(":")
    if not text.startswith("tcp://") or not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{text!r} is not an address: tcp://HOST:PORT")
    return host, int(port)


def read_ports(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 0
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise ConfigError(f"ports={text!r} is no range of ports: FIRST-LAST, as 7001-7016")
    low, high = int(first), int(last or first)
    if not 0 < low <= high <= 65535:
        raise ConfigError(f"ports={text} is out of range: 1 to 65535, the first not above the last")
    return low, high


def warn_insecure(host: str) -> None:
    if not host.startswith(LOOPBACK):
        console.print(Text(INSECURE, style="bold red"), soft_wrap=True)


def check_advertised(address: str | None) -> None:
    if address is not None and not re.fullmatch(r"[A-Za-z0-9.-]+", address):
        raise ConfigError(
            f"advertise={address!r} is no name or address of a machine, as 10.0.0.1 (without tcp:// and port)"
        )
