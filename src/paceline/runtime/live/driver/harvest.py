"""What is left when a live run has ended: parameters from servers or peers, buffers from workers, traces from all."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.trace import Header
from paceline.run import ON_SERVERS, Run
from paceline.runtime.live import memory
from paceline.runtime.live.recording import gather

if TYPE_CHECKING:
    from paceline.runtime.live.driver.launch import Driver


def harvest(driver: Driver, output: Path) -> Run:
    lead = driver.lead
    assert lead is not None
    assert lead.layout is not None
    members, folder = driver.members, driver.folder.path
    evaluated = ON_SERVERS
    apart: list[float] = []
    if driver.peers.active:
        final = driver.peers.final()
        values = final.values
        peers = f"{final.count} peer{'s' * (final.count != 1)}"
        evaluated = f"the peers that logged them; the model is the average of {peers}"
        apart = [final.distance]
    else:
        values = memory.attach(folder / memory.WHOLE, lead.layout).clone()
    parameters = lead.layout.named(values)
    average = folder / memory.AVERAGE
    slice_bytes = lead.layout.slice_bytes(max(1, members.servers))
    trace = gather(output, Header("live", str(driver.policy), members, driver.plan.seed, slice_bytes))
    time_s = trace.records[-1].event.at if trace.records else 0.0
    return Run(
        policy=str(driver.policy),
        runtime="live",
        history=driver.history,
        trace=trace,
        parameters=parameters,
        time_s=time_s,
        target=driver.plan.target,
        time_to_target_s=driver.reached_s,
        others=others(folder, parameters, lead.aliases),
        average=lead.layout.named(memory.attach(average, lead.layout).clone()) if average.exists() else {},
        evaluated=evaluated,
        consensus=[(time_s, distance) for distance in apart],
        failures=driver.failures,
        server_changes=driver.changes,
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
            print(f"WARNING: {path.name} is left out: {error}", file=sys.stderr)
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
