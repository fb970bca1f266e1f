"""A worker that runs a script: the program that `process_setup.START` begins, or a fork of a process that did."""

from __future__ import annotations

import os
import runpy
import sys

from paceline import session
from paceline.runtime.live.system.fork_server import SOCKET
from paceline.runtime.live.system.process_setup import let_the_driver_end_us, run_worker


def main() -> None:
    """Runs the worker's script in this interpreter, or in the forks of this one if it is a fork server."""
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    if (number := os.environ.pop(SOCKET, None)) is not None:
        from paceline.fork_server_process import serve

        serve(int(number))
    let_the_driver_end_us()
    rank = int(os.environ["PACELINE_RANK"])
    sys.exit(run_worker(rank, lambda: runpy.run_path(script, run_name="__main__"), session.leave))
