"""`paceline stop` and `paceline checkpoint`: what may be asked of a run that goes on, from another terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from paceline import run_folder
from paceline.commands.terminal import print_plain


@dataclass(kw_only=True)
class Stop:
    """End a run in order, as Ctrl-C in its terminal does: paceline stop DIR

    All workers end after their current iteration, a checkpoint is written, and `paceline resume DIR` goes on with it.
    """

    dir: Annotated[str, tyro.conf.Positional]
    """The folder of the run."""

    def main(self) -> int:
        from paceline.runtime.live.driver.control_client import ask_to_stop

        print_plain(ask_to_stop(run_folder.read_live(Path(self.dir))))
        return 0


@dataclass(kw_only=True)
class Checkpoint:
    """Have a run write a checkpoint now: paceline checkpoint DIR"""

    dir: Annotated[str, tyro.conf.Positional]
    """The folder of the run."""

    def main(self) -> int:
        from paceline.runtime.live.driver.control_client import ask_for_checkpoint

        print_plain(ask_for_checkpoint(run_folder.read_live(Path(self.dir))))
        return 0
