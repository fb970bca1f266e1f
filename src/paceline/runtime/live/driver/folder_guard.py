"""What the driver does when somebody deletes or moves the run's folder while the run goes on: nothing more is lost.

The folder is made again, with its configuration, and a checkpoint is ordered at once. What was in it is gone: the trace
up to then, older checkpoints, and the logs of a durable run, which from then on is not durable any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from paceline import private_files, run_folder
from paceline.run import write_whole

EVERY_S = 0.5


class FolderGuard:
    """Looks now and then whether the run's folder is there, and makes it again; idle in a run that leaves none."""

    def __init__(
        self,
        folder: Path | None,
        live: Path,
        traces: Path,
        look_after: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """`live` is the run's folder in shared memory; `look_after` is called when the folder was lost."""
        self.folder = folder
        self.live = live
        self.look_after = look_after
        self.say = say
        self.lost = False
        """Whether the folder was deleted, and the trace with it."""
        self.looked_s = 0.0
        self.traces = traces.resolve()
        self.config = _content(self.folder / run_folder.CONFIG) if self.folder is not None else None
        self.known = self._identities()

    def _identities(self) -> dict[Path, tuple[int, int] | None]:
        """Device and inode of each folder that must not go away; None where there is none."""
        folders = [self.folder, self.traces] if self.folder is not None else []
        return {path: _identity(path) for path in folders if path is not None}

    def tick(self) -> None:
        """Look now and then."""
        if time.monotonic() - self.looked_s >= EVERY_S:
            self.look()

    def look(self) -> None:
        self.looked_s = time.monotonic()
        folder = self.folder
        if folder is None or self._identities() == self.known:
            return
        self.lost = True
        self.say(
            f"WARNING: {folder} was deleted or moved while the run goes on: what was in it is lost, the trace too; "
            "it is made again for the model and for checkpoints"
        )
        self.look_after()
        try:
            private_files.make_folder(self.traces, exist_ok=True)
            run_folder.write_live(folder, self.live)
            if self.config is not None and not (folder / run_folder.CONFIG).exists():
                write_whole(folder / run_folder.CONFIG, self.config, private=True)
        except OSError as error:
            self.say(f"WARNING: it cannot be made again: {error}; training goes on")
        self.known = self._identities()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
