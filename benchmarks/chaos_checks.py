"""What must hold of a run of `benchmarks/chaos.py` that has ended, seen from outside: its folder, its output, /proc.

`judge` says in a word how the run ended and what is wrong with that. A run may end badly only for a reason that the
documents name and its faults explain (`LOST`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from chaos_job import LR, SAMPLES, data, make_model
from soaking import left_of, used_once

from paceline import run_folder
from paceline.runtime.live.storage import checkpoint
from paceline.testing.samples import counted

if TYPE_CHECKING:
    from chaos import Runner

NOTHING = r"there is no whole checkpoint|is not a run's folder"
"""How `paceline resume` refuses a run that has left nothing."""
DROPPING = ("backup", "deadline")
"""Policies under which a gradient may count on one shard and be dropped on another."""


def landed(runner: Runner, what: str, role: str) -> int:
    return sum((fault.what, fault.role) == (what, role) for fault in runner.outcome.landed)


def stopped_for_long(runner: Runner) -> int:
    """How many workers may be given up (`--hang-timeout-s`)."""
    limit = runner.plan.hang_timeout_s or math.inf
    return sum(fault.role == "worker" and fault.for_s > limit - 1 for fault in runner.outcome.landed)


def begins_anew(runner: Runner) -> bool:
    """Whether a server was killed that had nothing to go on from but the checkpoint of the beginning, as it said."""
    kept = runner.plan.durable or runner.plan.checkpoints
    return not kept and bool(landed(runner, "kill", "server")) and "updates since then are lost" in runner.outcome.log


def size_of(runner: Runner, kind: str) -> int:
    """How many steps were begun, or acknowledged, by what the workers wrote down."""
    return sum(path.stat().st_size for path in runner.notes.glob(f"*.{kind}"))


def found_nothing(runner: Runner) -> bool:
    """Whether `paceline resume` has just refused since nothing was left, and rightly so."""
    refused = runner.code in (1, 2) and re.search(NOTHING, last_line(runner)) is not None
    kept = bool(checkpoint.whole(runner.folder / checkpoint.FOLDER))
    return refused and not kept and not (runner.plan.durable and size_of(runner, "acked"))


def last_line(runner: Runner) -> str:
    return (runner.base / "log").read_text(errors="replace").strip().rpartition("\n")[2]


def judge(runner: Runner) -> tuple[str, list[str]]:
    """How the run ended, and what is wrong."""
    wrong = list(leftovers(runner))
    if "Traceback" in runner.outcome.log:
        wrong.append("a traceback")
    if (given_up := runner.outcome.log.count("given up")) > stopped_for_long(runner):
        wrong.append(f"{given_up} workers were given up, {stopped_for_long(runner)} stopped for so long")
    if runner.code == 0:
        return "ended well", wrong + list(defects(runner))
    reason = excuse(runner)
    return reason, wrong if reason else [*wrong, f"exit code {runner.code}: {last_line(runner)}"]


def excuse(runner: Runner) -> str:
    """Why the documents allow this run to end badly; nothing if they do not."""
    plan, log = runner.plan, runner.outcome.log
    killed = landed(runner, "kill", "worker") + stopped_for_long(runner)
    if runner.code != 1:
        return ""
    if not plan.restarts and killed and "before the run began" in log:
        return "a worker was killed before the run began, without restarts"
    if not plan.restarts and killed >= plan.workers:
        return "all workers were killed, without restarts"
    if plan.peers and killed >= plan.workers and ("every peer that had" in log or "no peer came to its end" in log):
        return "all peers that had parameters were killed"
    return ""


def leftovers(runner: Runner) -> Iterator[str]:
    for driver in runner.drivers:
        yield from left_of(driver)
    for path in [*runner.folder.rglob("*.part"), runner.folder / run_folder.LIVE, runner.folder / "trace"]:
        if path.exists():
            yield f"{path.relative_to(runner.folder)} is left"


def defects(runner: Runner) -> Iterator[str]:
    """What is wrong with what a run that ended well has left."""
    try:
        run = run_folder.load(runner.folder)
    except Exception as error:
        yield f"what the run left cannot be read: {error}"
        return
    model = make_model()
    points, classes = data()
    with torch.no_grad():
        first = torch.nn.functional.cross_entropy(model.layers(points), classes).item()
        model.load_state_dict(run.parameters)
        last = torch.nn.functional.cross_entropy(model.layers(points), classes).item()
    if not all(value.isfinite().all() for value in run.parameters.values()):
        yield "the model is not finite"
    if not last < 0.8 * first and not begins_anew(runner):
        yield f"it has not learned: loss {first:.3f} at the beginning, {last:.3f} in the end"
    yield from wrong_count(runner, run.parameters["count"] / LR)
    yield from lost_samples(runner)
    if run.replay():
        yield "the trace does not replay"
    yield from used_once(run)


def wrong_count(runner: Runner, count: torch.Tensor) -> Iterator[str]:
    """Updates lost or made twice. Each has a weight of 1 / workers at least and 1 at most."""
    plan, begun, acked = runner.plan, size_of(runner, "begun"), size_of(runner, "acked")
    least, most = count.min().item(), count.max().item()
    if not (most > 0 or begins_anew(runner)) or most > 1.001 * begun:
        yield f"{most:.1f} updates came of {begun} steps"
    if plan.peers:
        return
    lossless = plan.durable or not (landed(runner, "kill", "server") or landed(runner, "kill", "driver"))
    dropping = any(name in plan.policy for name in DROPPING)
    # What only waits for others when the whole run dies is not in its logs (docs/durability.md).
    waiting = plan.workers * landed(runner, "kill", "driver") if dropping else 0
    there = most * plan.servers if dropping else least
    if lossless and there * 1.001 + 0.01 < (acked - waiting) / plan.workers:
        yield f"an acknowledged update is lost: {acked} were acknowledged, {there * plan.workers:.1f} are in the model"


def lost_samples(runner: Runner) -> Iterator[str]:
    path = runner.base / "epochs"
    there = counted(runner.notes)
    for epoch in json.loads(path.read_text()) if path.exists() else ():
        if missing := set(range(SAMPLES)) - set(there.get(epoch, ())):
            yield f"{len(missing)} samples of epoch {epoch} are lost"
