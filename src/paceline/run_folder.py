"""The folder a live run leaves: configuration, metrics, trace, model, checkpoints. Everything readable by anything.

config.json          what was run, enough to run it again (`paceline resume DIR`)
metrics.json         the summary and the history
trace.jsonl          every event and every decision (core/trace.py)
times.jsonl          what iterations and servers spent their time on (core/step_times.py)
model.safetensors    the model's state: `model.load_state_dict(safetensors.torch.load_file(...))`
average.safetensors  the same with the moving average of the parameters, if one was kept (`ema`)
durable/             the servers' logs, if they have any: see runtime/live/storage/update_log.py
checkpoints/         see runtime/live/storage/checkpoint.py
feed.jsonl           what the driver knows besides: its clock, what was logged and said (watching/driver_records.py)
page.token           while its page is served: the token to see it, for Prometheus
live.json            while it runs: where its driver listens (`paceline servers DIR N`)
trace/               while it runs: what will be in trace.jsonl, a file for each process
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import private_files
from paceline.core.step_times import encode_rows, read_rows
from paceline.core.trace import Trace
from paceline.errors import ConfigError, Damaged, PacelineError, RunFailed
from paceline.run import ON_SERVERS, Point, Run, ServerChange, Target, write_whole

CONFIG, METRICS, TRACE, MODEL = "config.json", "metrics.json", "trace.jsonl", "model.safetensors"
TIMES = "times.jsonl"
AVERAGE = "average.safetensors"
LIVE = "live.json"
UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError, msgspec.MsgspecError, PacelineError,
)  # fmt: skip
"""What reading damaged files may raise."""

logger = logging.getLogger(__name__)


def new(base: Path, label: str) -> Path:
    """Makes a new folder for a run, named by the time and a label."""
    name = "".join(letter if letter.isalnum() or letter in "=,.-" else "-" for letter in label)
    folder = base / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    number = 1
    while folder.exists():
        number += 1
        folder = folder.with_name(f"{folder.name.removesuffix(f'.{number - 1}')}.{number}")
    return private_files.make_folder(folder)


def write_config(folder: Path, config: dict[str, Any]) -> None:
    write_whole(folder / CONFIG, json.dumps(config, indent=2).encode() + b"\n", private=True)


def read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{str(folder)!r} is not a run's folder: it has no readable {CONFIG}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{str(folder / CONFIG)!r} is not a run's configuration")
    return config


def write_live(folder: Path, shared: Path) -> None:
    """Notes where a run that goes on now has its sockets."""
    private_files.make_folder(folder, exist_ok=True)
    write_whole(folder / LIVE, json.dumps({"folder": str(shared)}).encode() + b"\n", private=True)


def read_live(folder: Path) -> Path:
    """Returns where the run has its sockets, and refuses one that does not go on now."""
    read_config(folder)
    if (shared := live_folder(folder)) is None:
        raise ConfigError(f"the run in {str(folder)!r} is not going on")
    return shared


def live_folder(folder: Path) -> Path | None:
    """Returns what `write_live` has noted; the note of a run whose driver was killed stays."""
    try:
        return Path(json.loads((folder / LIVE).read_text(encoding="utf-8"))["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_ended(folder: Path) -> str:
    """Returns how the run came to its end (`Run.ended`); "" if it has not, or if that is not known."""
    try:
        return str(json.loads((folder / METRICS).read_text(encoding="utf-8"))["ended"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def forget_end(folder: Path) -> None:
    """Marks a run as going on: how it ended before does not count any more."""
    try:
        metrics = json.loads((folder / METRICS).read_text(encoding="utf-8"))
        write_whole(folder / METRICS, json.dumps({**metrics, "ended": ""}, indent=2).encode() + b"\n", private=True)
    except (OSError, ValueError, TypeError):
        return  # there is none that says anything


def save(folder: Path, run: Run) -> Path:
    """Writes what a run has left, the model first, and returns where the model is. Files without room are warnings.

    Files appear whole or not at all. If the folder is gone it is made again, and if it has no room the model goes to
    the folder for temporary files. Raises `RunFailed` if the model cannot be written anywhere.
    """
    began = time.monotonic()
    place = _save_model(folder, run.model())
    metrics: dict[str, Any] = {
        "runtime": run.runtime,
        "policy": run.policy,
        "target": str(run.target) if run.target is not None else None,
        "summary": run.summary(),
        "history": [point.plain() for point in run.history],
        "ended": run.ended,
        "failures": run.failures,
        "consensus": run.consensus,
    }
    optional: dict[str, Callable[[], object]] = {}
    if not (folder / CONFIG).exists():
        optional[CONFIG] = lambda: write_config(folder, run.config)
    if run.average:
        optional[AVERAGE] = lambda: _save_tensors(folder / AVERAGE, run.averaged_model())
    optional[TRACE] = lambda: write_whole(folder / TRACE, run.trace.to_bytes(), private=True)
    optional[TIMES] = lambda: write_whole(folder / TIMES, encode_rows(run.times), private=True)

    def write_metrics() -> None:
        if run.wall:
            run.wall["reporting_s"] = time.monotonic() - began
            metrics["summary"]["wall"] = run.wall
        write_whole(folder / METRICS, json.dumps(metrics, indent=2).encode() + b"\n", private=True)

    # Last: with it the run is finished.
    optional[METRICS] = write_metrics
    for name, write in optional.items():
        try:
            write()
        except (OSError, SafetensorError) as error:
            logger.warning(f"{folder / name} could not be written: {_reason(error)}")
    return place


def _save_model(folder: Path, model: dict[str, Tensor]) -> Path:
    """Writes the model where there is room for it, and returns where that is."""
    path = folder / MODEL
    try:
        private_files.make_folder(folder, exist_ok=True)
        _save_tensors(path, model)
    except (OSError, SafetensorError) as error:
        problem = f"{path} could not be written: {_reason(error)}"
    else:
        return path
    try:
        elsewhere = Path(tempfile.mkdtemp(prefix="paceline-model-")) / MODEL
        _save_tensors(elsewhere, model)
    except (OSError, SafetensorError) as error:
        raise RunFailed(f"{problem}; nor could it be in {tempfile.gettempdir()}: {_reason(error)}") from None
    logger.warning(f"{problem}; the model is in {elsewhere}")
    return elsewhere


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        save_file({name: value.contiguous().clone() for name, value in tensors.items()}, part)
        part.replace(path)
    except (OSError, SafetensorError):
        part.unlink(missing_ok=True)
        raise


def load(folder: Path) -> Run:
    """Reads the run a folder holds; raises `ConfigError` if it did not end, `Damaged` if its files cannot be read."""
    config = read_config(folder)
    if missing := [name for name in (METRICS, TRACE, MODEL) if not (folder / name).is_file()]:
        raise ConfigError(f"the run in {str(folder)!r} did not end: it has no {' and no '.join(missing)}")
    try:
        return _load(folder, config)
    except UNREADABLE as error:
        problem = f"{type(error).__name__}: {error}"
        raise Damaged(f"what the run in {str(folder)!r} has left cannot be read ({problem})") from None


class KeptMetrics(msgspec.Struct, frozen=True):
    """What `metrics.json` holds."""

    runtime: str
    policy: str
    target: str | None
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    failures: list[str]
    ended: str = ""
    consensus: list[tuple[float, float]] = []


def _load(folder: Path, config: dict[str, Any]) -> Run:
    metrics = msgspec.convert(json.loads((folder / METRICS).read_text(encoding="utf-8")), KeptMetrics)
    summary = metrics.summary
    return Run(
        policy=metrics.policy,
        runtime=metrics.runtime,
        history=[msgspec.convert(list(Point.from_plain(point)), Point) for point in metrics.history],
        trace=Trace.from_bytes((folder / TRACE).read_bytes()),
        times=read_rows((folder / TIMES).read_bytes()) if (folder / TIMES).exists() else [],
        parameters=load_file(folder / MODEL),
        time_s=summary["time_s"],
        target=Target.parse(metrics.target) if metrics.target is not None else None,
        time_to_target_s=summary["time_to_target_s"],
        config=config,
        average=load_file(folder / AVERAGE) if (folder / AVERAGE).exists() else {},
        evaluated=summary.get("evaluated", ON_SERVERS),
        failures=metrics.failures,
        wall=summary.get("wall", {}),
        ended=metrics.ended,
        consensus=metrics.consensus,
        server_changes=[ServerChange(**change) for change in summary.get("server_changes", ())],
    )
