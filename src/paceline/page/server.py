"""The process that serves the page of a run: on an own port, until nobody needs it any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec

from paceline import private_files
from paceline.errors import ConfigError
from paceline.page.access import Access, Tokens

LINGER_S = 600.0
"""So long the page of a run that has ended is served while nobody has it open."""
LOOK_S = 2.0
TOKEN_FILE = "page.token"
"""In the run's folder: the token to see, for Prometheus."""
INSTALL = "the live page needs starlette and uvicorn: pip install 'paceline[page]'"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class PageOptions:
    """Where and how the page is served."""

    folder: str
    host: str
    port: int
    tokens: Tokens
    names: tuple[str, ...] = ()
    """By which other names this machine is called."""
    certificate: str | None = None
    key: str | None = None
    linger_s: float | None = None
    """None: until it is ended."""
    iterations: int | None = None

    @property
    def scheme(self) -> str:
        return "https" if self.certificate is not None else "http"

    def address(self, token: str) -> str:
        name = self.names[0] if self.names else self.host
        name = f"[{name}]" if ":" in name else name
        return f"{self.scheme}://{name}:{self.port}/?token={token}"

    def hosts(self) -> frozenset[str]:
        """Returns the values of the Host header that are meant for this server."""
        own = (*self.names, self.host, *(LOOPBACK if self.host in LOOPBACK else ()))
        return frozenset(f"[{name}]:{self.port}" if ":" in name else f"{name}:{self.port}" for name in own)


def check_installed() -> None:
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ConfigError(INSTALL)


def check_place(host: str, certificate: str | None, key: str | None, names: tuple[str, ...]) -> None:
    """Refuses to serve others without TLS."""
    if (certificate is None) != (key is None):
        raise ConfigError("--tls-cert and --tls-key belong together")
    for path in (certificate, key):
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"{path} cannot be read")
    if host not in LOOPBACK and certificate is None:
        raise ConfigError(
            f"--host {host} is beyond loopback: give --tls-cert and --tls-key, or leave it at 127.0.0.1 and come by "
            "ssh -L"
        )
    if host in ("0.0.0.0", "::") and not names:
        raise ConfigError(f"--host {host} needs --name, by which browsers call this machine")


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Refuses files that are no certificate and its key."""
    if certificate is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"{certificate} and {key} are no certificate and its key: {error}") from None


def open_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(64)
    except OSError as error:
        listening.close()
        raise ConfigError(f"the page cannot be served on {host}, port {port}: {error.strerror}") from None
    return listening


def serve(options: PageOptions, listening: socket.socket) -> None:
    """Serves the page until it is ended, or not needed any more."""
    import uvicorn

    from paceline.page.app import make_app
    from paceline.page.broadcast import Broadcast

    folder = Path(options.folder).resolve()
    broadcast = Broadcast(folder, options.iterations)
    access = Access(options.tokens, options.hosts(), options.scheme, f"paceline_{options.port}")
    config = uvicorn.Config(
        make_app(broadcast, access),
        log_level="critical",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=16384,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key,
    )
    server = uvicorn.Server(config)

    async def end_when_idle() -> None:
        while options.linger_s is not None:
            await asyncio.sleep(LOOK_S)
            if broadcast.is_idle(options.linger_s) or not folder.is_dir():
                server.should_exit = True
                return

    async def work() -> None:
        watching = asyncio.create_task(end_when_idle())
        try:
            await server.serve(sockets=[listening])
        finally:
            watching.cancel()

    token_file = folder / TOKEN_FILE
    with contextlib.suppress(OSError):
        private_files.replace(token_file, options.tokens.view.encode() + b"\n")
    try:
        asyncio.run(work())
    finally:
        with contextlib.suppress(OSError):
            if token_file.read_text().strip() == options.tokens.view:
                token_file.unlink()


def start(options: PageOptions, listening: socket.socket) -> subprocess.Popen[bytes]:
    """Serves the page in a process of its own, in a session of its own, which this one's end does not end."""
    number = listening.fileno()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.page.server", str(number)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        pass_fds=(number,), start_new_session=True, cwd="/",
    )  # fmt: skip
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(json.dumps(asdict(options)).encode())  # not in its arguments, which all users see
        process.stdin.close()
    return process


def main() -> None:
    """Is the process that `start` has started."""
    os.nice(10)
    options = msgspec.json.decode(sys.stdin.buffer.read(), type=PageOptions)
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        serve(options, listening)


if __name__ == "__main__":
    main()
