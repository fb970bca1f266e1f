"""Asking the driver of a run that goes on for something, from another process: `paceline servers`, `stop`,
`checkpoint`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ConfigError, RunFailed
from paceline.runtime.live.messaging.unix_sockets import Link
from paceline.runtime.live.protocol import requests, resizing_messages, wire

TICK_S = 0.5
PATIENCE_S = 120.0
"""The slowest worker first finishes the iteration it computes."""


def ask_for_servers(folder: Path, servers: int) -> str:
    """Have a run go on with so many servers; what came of it, in words."""
    return _ask(folder, lambda requester: resizing_messages.Want(servers, requester), "changed its servers")


def ask_to_stop(folder: Path) -> str:
    """Has a run end in order; returns what comes of it, in words."""
    return _ask(folder, requests.StopAsked, "heard that it is to stop")


def ask_for_checkpoint(folder: Path) -> str:
    """Has a run write a checkpoint; returns what comes of it, in words."""
    return _ask(folder, requests.CheckpointAsked, "begun a checkpoint")


def _ask(folder: Path, request: Callable[[str], wire.ToDriver], done: str) -> str:
    requester = f"asking:{os.getpid()}"
    link = Link(folder / "driver", requester.encode())
    try:
        link.send(wire.encode(request(requester)))
        until = time.monotonic() + PATIENCE_S
        while not link.gone and time.monotonic() < until:
            if (message := link.wait_for(TICK_S)) is not None:
                outcome = wire.decode_outcome(message)
                if outcome.refused:
                    raise ConfigError(outcome.text)
                return outcome.text
        if link.gone:
            raise RunFailed(f"the run ended before it had {done}")
        raise RunFailed(f"the run has not {done} within {PATIENCE_S:g} s; it still may")
    finally:
        link.close()
