"""`paceline page`: the live page of a run that goes on or has ended."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from paceline.counts import check_count
from paceline.errors import ConfigError
from paceline.page.access import Tokens
from paceline.page.server import (
    LINGER_S,
    PageOptions,
    check_certificate,
    check_installed,
    check_place,
    open_socket,
    serve,
    start,
)
from paceline.watching.run_reader import read_config

Quiet = tyro.conf.arg(help_behavior_hint="")


@dataclass(kw_only=True)
class Page:
    """Serve the live page of a run: paceline page DIR

    It prints an address to see the page, and one to control the run from it; keep them to yourself. Nobody else on this
    machine can see it, and no other machine can reach it: from another one, ssh -L PORT:127.0.0.1:PORT. The run is not
    asked for anything; Ctrl-C ends the page, not the run (docs/watching.md).
    """

    dir: Annotated[str, tyro.conf.Positional]
    """The folder of the run."""
    host: str = "127.0.0.1"
    """The address to listen on; others than loopback only with --tls-cert and --tls-key."""
    port: int = 0
    """The port; any free one if 0."""
    name: tuple[str, ...] = ()
    """By which names browsers call this machine, if not by --host."""
    tls_cert: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """The certificate, with its chain (PEM)."""
    tls_key: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Its key."""
    iterations: Annotated[int | None, Quiet] = None
    """How many iterations each worker is to do: then it says how long that takes."""

    def main(self) -> int:
        check_installed()
        check_place(self.host, self.tls_cert, self.tls_key, self.name)
        check_certificate(self.tls_cert, self.tls_key)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} is out of range: 0 to 65535")
        if self.iterations is not None:
            check_count("iterations", self.iterations)
        read_config(Path(self.dir))
        with open_socket(self.host, self.port) as listening:
            port = int(listening.getsockname()[1])
            options = PageOptions(
                self.dir, self.host, port, Tokens.new(), self.name, self.tls_cert, self.tls_key, None, self.iterations
            )
            for line in addresses(options):
                print(line, flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                serve(options, listening)
        return 0


def addresses(options: PageOptions) -> list[str]:
    """Returns what is printed."""
    return [
        f"the page of the run: {options.address(options.tokens.view)}",
        f"with controls:       {options.address(options.tokens.control)}",
    ]


def start_page(folder: Path) -> list[str]:
    """Starts the page of a run in a process of its own, which outlives this one; returns what is to be printed."""
    with open_socket("127.0.0.1", 0) as listening:
        port = int(listening.getsockname()[1])
        options = PageOptions(str(folder.resolve()), "127.0.0.1", port, Tokens.new(), linger_s=LINGER_S)
        start(options, listening)
    return addresses(options)
