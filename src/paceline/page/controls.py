"""What the page may ask of the run: the commands that a person would type, run as they are."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, printable

PATIENCE_S = 150.0
MOST_SERVERS = 1024


def command_of(what: str, given: Any) -> list[str]:
    """Returns the command for what was asked; `given` is the body of the request."""
    if what == "servers":
        count = given.get("count") if isinstance(given, dict) else None
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_SERVERS:
            raise ConfigError(f"the number of servers is from 1 to {MOST_SERVERS}")
        return ["servers", "{folder}", str(count)]
    if what in ("stop", "checkpoint"):
        return [what, "{folder}"]
    raise ConfigError("there is no such control")


async def execute(folder: Path, command: list[str]) -> tuple[bool, str]:
    """Runs the command for the run in this folder; returns whether it has done what it should, and what it said."""
    words = [str(folder) if word == "{folder}" else word for word in command]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline", *words,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return False, f"it took longer than {PATIENCE_S:g} s"
    return process.returncode == 0, printable(said.decode(errors="replace").strip())
