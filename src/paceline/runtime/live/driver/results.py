"""What is left when a live run has ended: parameters from servers or peers, buffers from workers, traces from all."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.messages import Members
from paceline.core.trace import Header
from paceline.policies.with_local_steps import text_of
from paceline.run import FAILED, FINISHED, ON_SERVERS, Point, Run, ServerChange, Target
from paceline.runtime.live.driver.run_state import Model
from paceline.runtime.live.storage import shared_memory
from paceline.runtime.live.storage.final_parameters import Final
from paceline.runtime.live.storage.trace_files import CUT, gather, gather_times

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What the driver has noted of a run besides what its processes leave in its folder."""

    members: Members
    history: list[Point]
    target: Target | None
    reached_s: float | None
    """When the target was reached."""
    failures: list[str]
    server_changes: list[ServerChange]
    ended: str
    clips_mean: bool


def collect_results(model: Model, seed: int, outcome: Outcome, folder: Path, final: Final | None) -> Run:
    """Returns what a run has come to. `final` is what peers have left, in a run without servers."""
    layout, members = model.layout, outcome.members
    evaluated = ON_SERVERS
    if final is not None:
        values = final.values
        peers = f"{final.count} peer{'s' * (final.count != 1)}"
        evaluated = f"the peers that logged them; the model is the average of {peers}"
    else:
        values = shared_memory.attach(folder / shared_memory.WHOLE, layout).clone()
    parameters = layout.named(values)
    average = folder / shared_memory.AVERAGE
    slice_bytes = layout.slice_bytes(max(1, members.servers))
    local = str(model.local_steps) if model.local_steps is not None else ""
    header = Header("live", str(model.policy), members, seed, slice_bytes, outcome.clips_mean, local)
    trace = gather(folder / "trace", header)
    time_s = trace.records[-1].event.at if trace.records else 0.0
    return Run(
        policy=text_of(str(model.policy), model.local_steps),
        runtime="live",
        history=outcome.history,
        trace=trace,
        times=gather_times(folder / "trace"),
        parameters=parameters,
        time_s=time_s,
        target=outcome.target,
        time_to_target_s=outcome.reached_s,
        others=others(folder, parameters, model.aliases),
        average=layout.named(shared_memory.attach(average, layout).clone()) if average.exists() else {},
        evaluated=evaluated,
        consensus=[(time_s, final.distance)] if final is not None else [],
        failures=outcome.failures,
        server_changes=outcome.server_changes,
        trace_is_whole=not (folder / CUT).exists(),
        ended=FAILED if outcome.failures and outcome.ended == FINISHED else outcome.ended,
    )


def keep_buffers(folder: Path) -> None:
    """Have the checkpoint at the end hold the workers' buffers as they are now."""
    # Not over the old file: what was read from it may still be mapped.
    save_file({name: tensor.contiguous() for name, tensor in with_buffers(folder).items()}, folder / "others-now")
    (folder / "others-now").replace(folder / "others")


def readable(paths: Iterable[Path]) -> list[dict[str, Tensor]]:
    """What processes have left, less what cannot be read: one that spoils its own must not spoil the run."""
    left = []
    for path in paths:
        try:
            left.append(load_file(path))
        except (OSError, SafetensorError) as error:
            logger.warning(f"{path.name} is left out: {error}")
    return left


def with_buffers(folder: Path) -> dict[str, Tensor]:
    """What is not trained; buffers as the mean over the workers that ended well."""
    held = load_file(folder / "others")
    left = readable(sorted(folder.glob("buffers-*")))
    for name in left[0] if left else ():
        values = torch.stack([buffers[name] for buffers in left])
        held[name] = values.mean(0) if values.is_floating_point() else values.amax(0)
    return held


def others(folder: Path, parameters: dict[str, Tensor], aliases: dict[str, str]) -> dict[str, Tensor]:
    """What the model holds besides its trained parameters."""
    held = with_buffers(folder)
    for alias, name in aliases.items():
        held[alias] = parameters[name] if name in parameters else held[name]
    return held
