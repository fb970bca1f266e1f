"""A worker that runs a script in a fresh interpreter: the program that `process_setup.START` begins."""

from __future__ import annotations

import os
import runpy
import sys

from paceline import session
from paceline.runtime.live.system.process_setup import let_the_driver_end_us, run_worker


def main() -> None:
    """Runs the worker's script in this interpreter, which `process_setup.START` has begun."""
    let_the_driver_end_us()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    rank = int(os.environ["PACELINE_RANK"])
    sys.exit(run_worker(rank, lambda: runpy.run_path(script, run_name="__main__"), session.leave))
