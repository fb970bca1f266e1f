"""Change a few lines of somebody's training script and compare it with what it was: used by `ports.py`.

A `Port` is a script that we do not have: where it is in a checkout, the edits that make it distributed, how it is
started, and how its losses are read. `compare` runs it in one process on the joined batch, then on several workers.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from paceline.errors import ConfigError

ORIGINAL, PORTED = "original.py", "ported.py"
DECIMALS = 1e-4
"""Losses that differ by less are equal to the fourth decimal."""
TIMEOUT_S = 540


class Edit(NamedTuple):
    """One changed line of a script."""

    how: Literal["before", "after", "replace"]
    """A new line before or after the line that has the anchor, or a text in place of the anchor."""
    anchor: str
    """A text that is in exactly one line of the script."""
    text: str


def apply(source: str, edits: Sequence[Edit], label: str = "the script") -> str:
    """The source with all edits made; new lines are indented like the lines beside them."""
    lines = source.splitlines(keepends=True)
    changed = [[line] for line in lines]
    for how, anchor, text in edits:
        places = [index for index, line in enumerate(lines) if anchor in line]
        if len(places) != 1:
            raise ConfigError(f"{anchor!r} is in {len(places)} lines of {label}, not in one: this is another version")
        here, line = changed[places[0]], lines[places[0]]
        indent = line[: len(line) - len(line.lstrip())]
        match how:
            case "before":
                here.insert(0, f"{indent}{text}\n")
            case "after":
                here.append(f"{indent}{text}\n")
            case "replace":
                here[here.index(line)] = line.replace(anchor, text)
    return "".join(line for here in changed for line in here)


def changed_lines(old: str, new: str) -> int:
    """How many lines were changed, a replaced one counted once."""
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def diff(old: str, new: str, label: str) -> str:
    """The changed lines as a unified diff without context."""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), label, f"{label}, ported", "", "", 0, "")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Port:
    """A script, the edits that make it distributed, and how it is run and read."""

    name: str
    script: str
    """Where it is in the checkout."""
    edits: Sequence[Edit]
    beside: Sequence[str] = ()
    """Other files of the checkout that it needs."""
    both: Sequence[Edit] = ()
    """Edits made in the script and in its port for the comparison with one process, as to switch dropout off."""
    is_its_own_reference: bool = False
    """One process runs the port too; otherwise the script as it was."""
    arguments: Sequence[str] = ()
    """What every run is given."""
    joined: Sequence[str]
    """What the one process is given: the batch of all workers, and clipping."""
    mean_clipped: Sequence[str]
    """What workers are given whose mean gradient the servers clip."""
    each_clipped: Sequence[str]
    """What workers are given that clip their own gradients."""
    step_loss: re.Pattern[str]
    """A step's loss in the output: the last group; the others tell the step."""
    end_loss: re.Pattern[str]
    """The loss of an evaluation in the output."""
    enough: float
    """What the last evaluation's loss must be below under every policy."""
    logs: bool = False
    """Each worker logs the loss of each step (`paceline.log`), so it is not looked for in the output."""
    model: str
    """The file with the trained model that it leaves."""
    evaluated_again: Sequence[str] = ()
    """What makes the script as it was evaluate the model file that is there, if it can."""
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], None] = lambda folder: None
    """Puts data into the folder it runs in."""

    def read(self, checkout: Path) -> str:
        """The script as it is in the checkout."""
        try:
            return (checkout / self.script).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{checkout / self.script}: {error.strerror}") from None


class Done(NamedTuple):
    """A run that has ended."""

    code: int
    output: str
    folder: Path
    """Where it ran."""
    metrics: dict[str, Any]
    """What `paceline run` left; empty for one process."""

    @property
    def last_words(self) -> str:
        return "\n".join(self.output.splitlines()[-12:])


class Runner:
    """Runs a port, each run in a folder of its own."""

    def __init__(self, port: Port, checkout: Path, folder: Path, workers: int) -> None:
        self.port, self.checkout, self.folder, self.workers = port, checkout, folder, workers
        self.source = port.read(checkout)
        self.ported = apply(self.source, port.edits, port.script)

    def lay_out(self, label: str, is_compared: bool) -> Path:
        """A folder with the script, its port, and what they need."""
        port, folder = self.port, self.folder / label
        both = port.both if is_compared else ()
        folder.mkdir(parents=True)
        for name in port.beside:
            (folder / Path(name).name).write_bytes((self.checkout / name).read_bytes())
        for name, source in ((ORIGINAL, self.source), (PORTED, self.ported)):
            (folder / name).write_text(apply(source, both, port.script), encoding="utf-8")
        port.prepare(folder)
        return folder

    def alone(self, script: str, arguments: Sequence[str], folder: Path) -> Done:
        """Run in one process."""
        return self._run([sys.executable, script, *self.port.arguments, *arguments], folder)

    def together(self, folder: Path, policy: str, arguments: Sequence[str], *options: str) -> Done:
        """Run on all workers."""
        start = [sys.executable, "-m", "paceline", "run", "--workers", str(self.workers), "--policy", policy]
        script = [PORTED, *self.port.arguments, *arguments]
        done = self._run([*start, "--dir", "run", *options, *script], folder)
        metrics = folder / "run" / "metrics.json"
        return done._replace(metrics=json.loads(metrics.read_text()) if metrics.exists() else {})

    def _run(self, command: list[str], folder: Path) -> Done:
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **self.port.environment}
        paths = [given["PYTHONPATH"] for given in (self.port.environment, os.environ) if "PYTHONPATH" in given]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, text=True, timeout=TIMEOUT_S,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Done(124, f"no end after {TIMEOUT_S} s", folder, {})
        (folder / "output.txt").write_text(done.stdout, encoding="utf-8")
        return Done(done.returncode, done.stdout, folder, {})

    def losses(self, done: Done, count: int) -> list[float]:
        """Each step's loss, the mean over its `count` workers; empty if some are missing."""
        steps: dict[tuple[int, ...], list[float]] = {}
        if self.port.logs and done.metrics:
            for point in done.metrics["history"]:
                steps.setdefault((point["updates"],), []).append(point["loss"])
        else:
            for *step, loss in self.port.step_loss.findall(done.output):
                steps.setdefault(tuple(map(int, step)), []).append(float(loss))
        if any(len(each) != count for each in steps.values()):
            return []
        return [sum(steps[step]) / count for step in sorted(steps)]

    def end_loss(self, done: Done) -> float | None:
        """The loss of the last evaluation."""
        found = self.port.end_loss.findall(done.output)
        return float(found[-1]) if found else None


class Row(NamedTuple):
    """One run, for the table."""

    script: str
    run: str
    seconds: float | None
    iterations: int | None
    updates: int | None
    dropped: int | None
    end_loss: float | None


class Claim(NamedTuple):
    """What was found, and whether it is what must be."""

    text: str
    holds: bool


def row(runner: Runner, label: str, done: Done) -> Row:
    summary = done.metrics.get("summary", {})
    seconds, iterations, updates, dropped = map(summary.get, ("time_s", "iterations", "updates", "dropped"))
    return Row(runner.port.name, label, seconds, iterations, updates, dropped, runner.end_loss(done))


def compare(runner: Runner) -> Iterator[Row | Claim]:
    """Bsp beside one process on the joined batch."""
    port, workers = runner.port, runner.workers
    reference = PORTED if port.is_its_own_reference else ORIGINAL
    alone = runner.alone(reference, port.joined, runner.lay_out("alone", True))
    yield row(runner, "one process, joined batch", alone)
    bsp = runner.together(runner.lay_out("bsp-mean-clipped", True), "bsp", port.mean_clipped)
    yield row(runner, "bsp, the mean clipped", bsp)
    each = runner.together(runner.lay_out("bsp-each-clipped", True), "bsp", port.each_clipped)
    yield row(runner, "bsp, each clipped", each)
    for done in (alone, bsp, each):
        if done.code:
            yield Claim(f"{port.name}: exit code {done.code} in {done.folder}\n{done.last_words}", False)
            return
    counts = ((alone, 1), (bsp, workers), (each, workers))
    yield from check_equal(port, *(runner.losses(done, count) for done, count in counts))
    models = [load_model(done.folder / port.model) for done in (alone, bsp)]
    apart = max(float((models[0][name] - models[1][name]).abs().max()) for name in models[0])
    yield Claim(f"{port.name}: parameters of the two models differ by {apart:.1e} at most", apart < DECIMALS)
    how = "as the two runs evaluated it"
    if port.evaluated_again:
        again = [*port.joined, *port.evaluated_again]
        alone, bsp = (runner.alone(ORIGINAL, again, done.folder) for done in (alone, bsp))
        how = "evaluated by the script as it was, from the two checkpoints"
    ends = [runner.end_loss(done) for done in (alone, bsp)]
    text = f"{port.name}: loss of the two models, {how}: {ends[0]} and {ends[1]}"
    yield Claim(text, None not in ends and abs(ends[0] - ends[1]) < DECIMALS)


def train_under(runner: Runner, policies: Sequence[str], options: Sequence[str] = ()) -> Iterator[Row | Claim]:
    """Each policy, with these options of `paceline run`."""
    port = runner.port
    for policy in policies:
        folder = runner.lay_out(re.sub(r"[^\w=,.-]", "-", policy), False)
        done = runner.together(folder, policy, port.each_clipped, *options)
        yield row(runner, policy, done)
        end = runner.end_loss(done)
        if done.code or end is None:
            yield Claim(f"{port.name}, {policy}: exit code {done.code} in {folder}\n{done.last_words}", False)
        else:
            yield Claim(f"{port.name}, {policy}: loss {end:.4f}, below {port.enough}", end < port.enough)


def check_equal(port: Port, expected: list[float], found: list[float], other: list[float]) -> Iterator[Claim]:
    """Whether the losses are those of one process, and clipping was at work."""
    if not expected or len(expected) != len(found) or len(expected) != len(other):
        counts = f"{len(expected)} steps in one process, {len(found)} and {len(other)} on workers"
        yield Claim(f"{port.name}: losses are missing: {counts}", False)
        return
    apart, otherwise = (max(abs(a - b) for a, b in zip(expected, each, strict=True)) for each in (found, other))
    text = f"{port.name}: losses of {len(expected)} steps differ by {apart:.1e} at most with the mean clipped"
    yield Claim(text, apart < DECIMALS)
    text = f"{port.name}: they differ by {otherwise:.1e} where each worker's gradient is clipped"
    yield Claim(text, otherwise > 10 * DECIMALS)  # else clipping was not tried


def load_model(path: Path) -> dict[str, torch.Tensor]:
    """The tensors in a file of `torch.save`, as a state dict or under "model" in a checkpoint."""
    loaded = torch.load(path, weights_only=True)
    return loaded.get("model", loaded)
