"""The program `paceline` begins here, before torch is imported: commands that train begin once more, if need be.

A copy through the caches reads what it is about to overwrite, and puts out what others have there. The C library copies
around them from some size on, and takes that size from what it believes the cache to be: on virtual machines that may
be ten times what there is. It can be told a size only before a process begins, by an environment variable. So `paceline
run` and its like set it, for themselves and for the workers that they fork, and begin again; workers then copy large
gradients that way (`paceline.runtime.live.worker.staging`, docs/decisions/0026).

Whoever has set the variable is left alone: `GLIBC_TUNABLES= paceline run ...` has nothing changed.
"""

from __future__ import annotations

import os
import platform
import sys

VARIABLE = "GLIBC_TUNABLES"
SETTING = "glibc.cpu.x86_non_temporal_threshold"
SMALLEST = 3 << 20
"""Bytes of a copy that goes around the caches. Gradients are copied in parts of four megabytes."""
OURS = f"{SETTING}={SMALLEST:#x}"

COMMANDS = (("run",), ("resume",), ("serve",), ("join",), ("host",), ("bench", "exchange"))
"""Those whose workers copy gradients."""


def main() -> None:
    if any(tuple(sys.argv[1 : 1 + len(words)]) == words for words in COMMANDS):
        begin_again()
    from paceline.cli import main as run

    run()


def begin_again() -> None:
    """Replace this program by itself, with the C library told; does nothing where that has been or cannot be."""
    if VARIABLE in os.environ or not sys.executable or not has_setting():
        return
    os.environ[VARIABLE] = OURS
    try:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except OSError:
        del os.environ[VARIABLE]


def has_setting() -> bool:
    """Whether this machine's C library knows it."""
    try:
        return platform.machine() == "x86_64" and (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, OSError):
        return False


def smallest() -> int | None:
    """Bytes of the smallest copy of this process that goes around the caches, if its environment says so."""
    for setting in os.environ.get(VARIABLE, "").split(":"):
        name, _, value = setting.partition("=")
        if name == SETTING and has_setting():
            try:
                return int(value, 0)
            except ValueError:
                return None
    return None


def environment_without() -> dict[str, str]:
    """This process's environment as it was before: for programs that are none of ours."""
    return {name: value for name, value in os.environ.items() if (name, value) != (VARIABLE, OURS)}
