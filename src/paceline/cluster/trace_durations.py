"""How long iterations took in a run that was recorded, worker by worker, from its trace."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from paceline.core.actions import Compute
from paceline.core.events import GradientReady
from paceline.core.trace import Trace
from paceline.errors import ConfigError, PacelineError

TRACE = "trace.jsonl"


def durations_in(file: str | None) -> tuple[tuple[float, ...], ...]:
    """Returns the seconds of each iteration, for each worker that finished one."""
    if not file:
        raise ConfigError(f"replay needs file=PATH, a {TRACE} or the folder of a run that has one")
    path = Path(file) / TRACE if Path(file).is_dir() else Path(file)
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"replay:file={file} cannot be read: {error.strerror}") from None
    except PacelineError as error:
        raise ConfigError(f"replay:file={file}: {error}") from None


@lru_cache(maxsize=4)
def _read(path: Path, changed: int) -> tuple[tuple[float, ...], ...]:
    """Reads the file once for each time `changed` at which it was written."""
    began: dict[tuple[int, int, int], float] = {}
    took: dict[int, list[float]] = {}
    for record in Trace.from_bytes(path.read_bytes()):
        if record.node.role != "worker":
            continue
        rank, incarnation, event = record.node.rank, record.incarnation, record.event
        if isinstance(event, GradientReady) and (rank, incarnation, event.iteration) in began:
            took.setdefault(rank, []).append(event.at - began.pop((rank, incarnation, event.iteration)))
        for action in record.actions:
            if isinstance(action, Compute):
                began[rank, incarnation, action.iteration] = event.at
    durations = tuple(tuple(took[rank]) for rank in sorted(took))
    if not any(seconds > 0 for mine in durations for seconds in mine):
        raise PacelineError("no worker finished an iteration in this trace")
    return durations
