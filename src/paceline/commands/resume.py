"""`paceline resume`: go on with a run that was stopped, or say that it is finished."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import tyro

from paceline import run_folder
from paceline.commands.options import Flag, Maybe
from paceline.commands.run import Run, Start
from paceline.commands.terminal import print_plain
from paceline.core.policy import PeerPolicy
from paceline.errors import ConfigError
from paceline.policies import parse
from paceline.run import FINISHED, STOPPED, TARGET
from paceline.runtime.live.storage import shared_memory

if TYPE_CHECKING:
    from paceline.commands.serve_join import Serve

NOT_RESUMED = ("dir", "json", "report", "chrome")
ENDS = {
    FINISHED: "its script has come to its end",
    TARGET: "it has reached {target}",
    STOPPED: "paceline.stop() has ended it",
}
"""The reason why there is nothing to go on with, for each way a run ends."""


@dataclass(kw_only=True)
class Resume:
    """Go on with a run from its last checkpoint: paceline resume DIR [-- the script's own arguments]

    A durable run goes on from its servers' logs, if these know more than the checkpoint. A damaged checkpoint is passed
    over for the one before it; damaged logs are refused: --from-checkpoint goes on without them.
    The script, its arguments and all options are those of the run; --workers and --servers may differ. A run that is
    finished is left as it is, unless something is given that makes it longer: --target, --from-checkpoint, other
    arguments of the script after --, or --anyway.
    """

    dir: Annotated[str, tyro.conf.Positional]
    """The folder of the run."""
    workers: Maybe[int] = None
    """Another number of workers."""
    servers: Maybe[int] = None
    """Another number of servers: the parameters are sliced anew."""
    target: Maybe[str] = None
    """Another target."""
    from_checkpoint: Maybe[int] = None
    """Go on from the checkpoint with this number (the names in DIR/checkpoints), whatever is newer or in the logs."""
    anyway: Flag = False
    """Train on although the run is finished."""

    def main(self, arguments: list[str]) -> int:
        from paceline.runtime.live.driver.durability import find_start
        from paceline.runtime.live.storage import checkpoint

        folder = Path(self.dir)
        config = run_folder.read_config(folder)
        if (shared := run_folder.live_folder(folder)) is not None and shared_memory.is_in_use(shared):
            raise ConfigError(f"the run in {self.dir!r} is going on: end it first, or wait for its end")
        if arguments and arguments[0].endswith(".py"):
            raise ConfigError(f"resume goes on with the script of the run: its arguments follow --, not {arguments[0]}")
        longer = self.anyway or arguments or self.target is not None or self.from_checkpoint is not None
        if not longer and (why := ENDS.get(run_folder.read_ended(folder))) is not None:
            why = why.format(target=config.get("target"))
            print_plain(f"the run in {folder} is finished: {why}. The model is {folder / run_folder.MODEL}")
            print_plain("to train it further give --target, the script's arguments after --, or --anyway")
            return 0
        script = [str(config.get("script")), *(arguments or config.get("arguments", []))]
        kind: type[Run | Serve] = Run
        if "bind" in config:  # its workers come from other machines
            from paceline.commands.serve_join import Serve

            kind = Serve
            if arguments:
                raise ConfigError("serve runs no script: give its arguments to paceline join")
        durable = bool(config.get("durable") or config.get("durable_fsync"))
        path = find_start(folder, durable, self.from_checkpoint, print_plain)
        start = Start(folder, path is not None, int(path.name) if path is not None else None)
        given: dict[str, Any] = {
            field.name: config[field.name]
            for field in fields(kind)
            if field.name in config and field.name not in NOT_RESUMED
        }
        if path is not None:  # the number of servers may have changed
            manifest = checkpoint.read(path)
            given["servers"] = None if isinstance(parse(manifest.policy), PeerPolicy) else len(manifest.shards)
        for name in ("workers", "servers", "target"):
            if (value := getattr(self, name)) is not None:
                given[name] = value
        try:
            command = msgspec.convert(given, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{folder / run_folder.CONFIG} is damaged: {error}") from None
        return command.main(script if kind is Run else [], start)
