"""`paceline serve` and `paceline join`: a run whose workers come from any machine, at any time."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from paceline.api import check_count
from paceline.commands.run import Run, check_script
from paceline.commands.screen import console
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.runtime.live.hosts import Hosts
    from paceline.runtime.live.launch import LivePlan

LOOPBACK = ("127.", "localhost", "[::1]")
KNOCK_S = 1.0


@dataclass(kw_only=True)
class Serve(Run):
    """Hold a run's parameters for workers of other machines: paceline serve --servers 2 --bind tcp://0.0.0.0:7000

    It prints the line to join with; the run begins when --workers have joined, and more may come at any time. It ends
    when the last has ended, and leaves a folder as `paceline run` does. Whoever has the key file may join: copy it by a
    safe way (scp), and to nobody else.
    """

    workers: int = 1
    """The run begins when so many have joined."""
    bind: str = "tcp://0.0.0.0:7000"
    """Where to listen for those who join. Servers take ports of their own (--ports)."""
    advertise: str | None = None
    """The address of this machine that others are to use, if it is not the one it listens on."""
    ports: str | None = None
    """The ports servers may take, as 7001-7016; any free ones if none."""
    key_file: str = "paceline.key"
    """Where the run's key is written (mode 0600)."""
    insecure: bool = False
    """No keys and no encryption: whoever reaches a port takes part. Only in a network you trust."""
    wire: str = "float32"
    """How floats travel to other machines: float32, bfloat16 or float16 (gradients with error feedback)."""

    def main(self, script: list[str], resume: Path | None = None) -> int:
        if script:
            raise ConfigError(f"serve runs no script: {script[0]!r} belongs to paceline join")
        return self.run(["serve"], resume)

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
        console.print(
            "[bold red]INSECURE: no keys and no encryption. Whoever reaches this network can read the model, change it "
            "and stop the run.[/]",
            soft_wrap=True,
        )
