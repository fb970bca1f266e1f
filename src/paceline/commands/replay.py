"""`paceline replay`: the logs of a durable run, played again (docs/durability.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from paceline import run_folder
from paceline.commands.terminal import console


@dataclass(kw_only=True)
class Replay:
    """Play the logs of a durable run again: paceline replay DIR

    It says how far each server is by its log, and whether the parameters that come out are those of the run's model,
    bit for bit.
    """

    dir: Annotated[str, tyro.conf.Positional]
    """The folder of the run."""

    def main(self) -> int:
        from paceline.runtime.live.driver.durability import compare, replay

        folder = Path(self.dir)
        rebuilt = replay(folder)
        for shard, server in enumerate(rebuilt):
            machine = server.machine
            console.print(
                f"server {shard}: {server.told} events, {machine.version} updates, at iteration {machine.progress.V}; "
                f"{len(server.records)} events since the last snapshot were replayed",
                soft_wrap=True,
            )
        model = folder / run_folder.MODEL
        if not model.exists():
            console.print("the run did not end: there is no model to compare with")
            return 0
        different = compare(rebuilt, model)
        same = "the parameters are those of the model, bit for bit"
        console.print(f"NOT the model's: {', '.join(different)}" if different else same, soft_wrap=True)
        return 1 if different else 0
