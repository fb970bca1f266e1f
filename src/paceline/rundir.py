"""The folder a live run leaves: configuration, metrics, trace, model, checkpoints. Everything readable by anything.

config.json          what was run, enough to run it again (`paceline resume DIR`)
metrics.json         the summary and the history
trace.jsonl          every event and every decision (core/trace.py)
model.safetensors    the model's state: `model.load_state_dict(safetensors.torch.load_file(...))`
average.safetensors  the same with the moving average of the parameters, if one was kept (`ema`)
durable/             the servers' logs, if they have any: see runtime/live/server/durable.py
checkpoints/         see runtime/live/checkpoint.py
live.json            while it runs: where its driver listens (`paceline servers DIR N`)
trace/               while it runs: what will be in trace.jsonl, a file for each process
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.trace import Trace
from paceline.errors import ConfigError
from paceline.run import ON_SERVERS, Point, Run, ServerChange, Target, write_whole

CONFIG, METRICS, TRACE, MODEL = "config.json", "metrics.json", "trace.jsonl", "model.safetensors"
AVERAGE = "average.safetensors"
LIVE = "live.json"


def new(base: Path, label: str) -> Path:
    """A new folder for a run, named by the time and a label."""
    name = "".join(letter if letter.isalnum() or letter in "=,.-" else "-" for letter in label)
    folder = base / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    number = 1
    while folder.exists():
        number += 1
        folder = folder.with_name(f"{folder.name.removesuffix(f'.{number - 1}')}.{number}")
    folder.mkdir(parents=True)
    return folder


def write_config(folder: Path, config: dict[str, Any]) -> None:
    write_whole(folder / CONFIG, json.dumps(config, indent=2).encode() + b"\n")


def read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{str(folder)!r} is not a run's folder: it has no readable {CONFIG}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{str(folder / CONFIG)!r} is not a run's configuration")
    return config


def write_live(folder: Path, shared: Path) -> None:
    """Leave word where a run that goes on now has its sockets."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / LIVE, json.dumps({"folder": str(shared)}).encode() + b"\n")


def read_live(folder: Path) -> Path:
    """Where the run has its sockets, if it goes on now."""
    read_config(folder)
    if (shared := live_folder(folder)) is None:
        raise ConfigError(f"the run in {str(folder)!r} is not going on")
    return shared


def live_folder(folder: Path) -> Path | None:
    """What `write_live` has left; that of a run whose driver was killed stays."""
    try:
        return Path(json.loads((folder / LIVE).read_text(encoding="utf-8"))["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(folder: Path, run: Run) -> None:
    """Write what a run left. Files appear whole or not at all."""
    metrics = {
        "runtime": run.runtime,
        "policy": run.policy,
        "target": str(run.target) if run.target is not None else None,
        "summary": run.summary(),
        "history": [point._asdict() for point in run.history],
        "failures": run.failures,
        "consensus": run.consensus,
    }
    write_whole(folder / METRICS, json.dumps(metrics, indent=2).encode() + b"\n")
    write_whole(folder / TRACE, run.trace.to_bytes())
    _save_tensors(folder / MODEL, run.model())
    if run.average:
        _save_tensors(folder / AVERAGE, run.averaged_model())


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    part = path.with_name(f".{path.name}.part")
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, part)
    part.replace(path)


def load(folder: Path) -> Run:
    """The run a folder holds, as far as it got."""
    config = read_config(folder)
    try:
        metrics = json.loads((folder / METRICS).read_text(encoding="utf-8"))
        trace = Trace.from_bytes((folder / TRACE).read_bytes())
        parameters = load_file(folder / MODEL)
        average = load_file(folder / AVERAGE) if (folder / AVERAGE).exists() else {}
    except (OSError, ValueError):
        raise ConfigError(f"the run in {str(folder)!r} did not end: it has no readable {METRICS} and {TRACE}") from None
    target = metrics["target"]
    return Run(
        policy=metrics["policy"],
        runtime=metrics["runtime"],
        history=[Point(**point) for point in metrics["history"]],
        trace=trace,
        parameters=parameters,
        time_s=metrics["summary"]["time_s"],
        target=Target.parse(target) if target is not None else None,
        time_to_target_s=metrics["summary"]["time_to_target_s"],
        config=config,
        average=average,
        evaluated=metrics["summary"].get("evaluated", ON_SERVERS),
        failures=metrics["failures"],
        consensus=[(at_s, distance) for at_s, distance in metrics.get("consensus", ())],
        server_changes=[ServerChange(**change) for change in metrics["summary"].get("server_changes", ())],
    )
