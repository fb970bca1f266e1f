"""Options that several commands share, and where their results go."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from paceline.errors import ConfigError, PacelineError
from paceline.report.chrome import chrome_trace
from paceline.report.html import write
from paceline.run import Run, write_whole
from paceline.sample_order import SHUFFLED
from paceline.tensors.layout import EPS

if TYPE_CHECKING:
    from paceline.runtime.live.driver.children import WorkerStarter

T = TypeVar("T")
Maybe = Annotated[T | None, tyro.conf.arg(help_behavior_hint="")]
"""The type of an option that need not be given; its help says what holds then."""
File = Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
Flag = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]
Folder = Annotated[str | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]


def check_file(option: str, name: str | None) -> None:
    """Refuses a file that cannot be written."""
    if name is None:
        return
    folder = Path(name).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {name}: the folder {str(folder)!r} does not exist or cannot be written")
    if Path(name).is_dir():
        raise ConfigError(f"{option} {name} is a folder: name a file")


@dataclass(kw_only=True)
class Outputs:
    """Where results are written. Files appear whole or not at all."""

    json: File = None
    """Write the results as JSON to this file."""
    report: File = None
    """Write an HTML report to this file: curves, worker lanes, who waited for whom."""
    chrome: File = None
    """Write a timeline to this file; it opens in Perfetto and chrome://tracing."""

    def check(self) -> None:
        """Refuses files that cannot be written, before anything runs."""
        for option, name in (("--json", self.json), ("--report", self.report), ("--chrome", self.chrome)):
            check_file(option, name)
        names = [name for name in (self.json, self.report, self.chrome) if name is not None]
        if len({Path(name).resolve() for name in names}) < len(names):
            raise ConfigError("--json, --report and --chrome must name different files")

    def save(self, runs: list[Run], config: dict[str, Any]) -> Iterator[Path]:
        """Write what was asked for and yield the files; in the end raise an error that names those without room."""
        problems = []
        writers = ((self.json, self._write_json), (self.report, self._write_report), (self.chrome, self._write_chrome))
        for name, write_file in writers:
            if name is None:
                continue
            try:
                write_file(Path(name), runs, config)
            except OSError as error:
                problems.append(f"{name} could not be written: {error.strerror or error}")
            else:
                yield Path(name)
        if problems:
            raise PacelineError("; ".join(problems))

    def _write_json(self, path: Path, runs: list[Run], config: dict[str, Any]) -> None:
        text = json.dumps({"runs": [run.summary() for run in runs], "config": config}, indent=2, allow_nan=False)
        write_whole(path, text.encode() + b"\n")

    def _write_report(self, path: Path, runs: list[Run], config: dict[str, Any]) -> None:
        write(path, [run.view() for run in runs], config)

    def _write_chrome(self, path: Path, runs: list[Run], config: dict[str, Any]) -> None:
        write_whole(path, chrome_trace([(run.policy, run.trace) for run in runs]))


@dataclass(kw_only=True)
class LocalStepOptions:
    """How long workers train alone before they exchange (docs/local-steps.md)."""

    local_steps: Maybe[str] = None
    """Train alone for so many steps between exchanges: 32, auto(at_least=16,at_most=64), proportional."""
    every_s: Maybe[float] = None
    """Train alone for so many seconds between exchanges."""
    outer: Maybe[str] = None
    """What servers do with what was learned alone: nesterov(lr=0.7,momentum=0.9), average, or any optimizer."""


@dataclass(kw_only=True)
class WorkerStart:
    """How the workers of this machine come to run a script."""

    preload: tuple[str, ...] = ()
    """Modules that the script needs and that are to be imported once on each machine, as torch is: workers are forks of
    a process that has them (docs/runs.md)."""
    fresh: Flag = False
    """Start each worker as a new Python that imports everything itself."""

    def starter(self, script: list[str], workers: int, merged: bool = True) -> WorkerStarter:
        """Returns what starts so many workers."""
        from paceline.runtime.live.driver.script_workers import script_starter

        return script_starter(script, workers, merged, self.preload, self.fresh)


@dataclass(kw_only=True)
class Training(Outputs, LocalStepOptions):
    """A bundled workload on a cluster."""

    workload: str = "digits-mlp"
    """What to train: digits-mlp, digits-cnn, fashion-cnn, fashion-resnet20:data=synthetic, fashion-vgg,
    char-transformer:width=64,layers=2, matrix-factorization:data=1m, svm, quadratic, or your own: ./mine.py:MyWorkload,
    a class with make_module, loss and train (docs/workloads.md)."""
    cluster: str = "steady"
    """Who is slow, and when: steady, one-slow:factor=4, random-slowdown:factor=6, factors:by_worker=1:1:4,
    lognormal:sigma=0.5, pareto:shape=2, bursts:length=20, replay:file=runs/x, each with compute_s, latency_s,
    bandwidth; a scenario.toml; or one of paceline's own, as spot-instances (`paceline scenarios` lists them)."""
    workers: int = 8
    """How many workers compute gradients."""
    servers: Maybe[int] = None
    """How many servers the parameters are sliced over (1; none under policies without servers, as hop)."""
    target: Maybe[str] = None
    """Stop when this is reached: accuracy=0.95 or loss=0.1. Missing it is a result, not an error."""
    iterations: Maybe[int] = None
    """Iterations of each worker at most (200; 2000 with a target)."""
    optimizer: Maybe[str] = None
    """The optimizer on the servers, as sgd:lr=0.1,momentum=0.9 or adam:lr=0.001; the workload's own if none. Besides
    its own parameters: clip=1, ema=0.999, stretch=true, schedule=cosine(samples=60000) (docs/optimizers.md)."""
    batch: Maybe[int] = None
    """Samples per worker and iteration; the workload's own if none."""
    seed: int = 0
    """Equal seeds give equal runs, to the byte."""
    by_layer: Flag = False
    """Workers read and push layer by layer, with a server for each layer (virtual time)."""
    slicing: str = EPS
    """How the parameters are cut over the servers: eps, equal slices; key-range, whole tensors, as many for each
    server, as in ps-lite (docs/sharding.md)."""
    shards: str = SHUFFLED
    """How samples are dealt: shuffled; or sorted by label, each worker its own for good (virtual time)."""
    device: str = "cpu"
    """Where gradients are computed: cpu, cuda, cuda:1 (virtual time; docs/virtual-gpu.md)."""

    def arguments(self) -> dict[str, Any]:
        names = {field.name for field in fields(Training)} - {field.name for field in fields(Outputs)}
        return {name: getattr(self, name) for name in names} | {"servers": 1 if self.servers is None else self.servers}
