"""How a worker or a peer joins a live run: it describes its model, and waits until the run begins with it.

Worker 0 of a run that has not begun leads: its values, its optimizer's state and what is not trained are the run's,
and it leaves them in the run's folder. All others, and a later incarnation of worker 0, only describe what they have.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from paceline.core.policy import Policy
from paceline.errors import PacelineError, printable
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.configuration import Endpoint, ModelDevice
from paceline.runtime.live.storage import shared_memory
from paceline.runtime.live.system.training_end import Stopped
from paceline.runtime.live.trainer.device_report import DeviceReport
from paceline.runtime.live.trainer.model_description import ModelDescription, contiguous
from paceline.runtime.live.trainer.run_connection import RunConnection
from paceline.tensors.layout import flatten, put
from paceline.tensors.shard_optimizer import THERE

IDLE_S = 0.2
BEGUN = "begun"
"""A file that exists once the run has begun: a later incarnation of worker 0 joins like any other worker."""


def introduce(
    run: RunConnection,
    model: ModelDescription,
    policy: Policy | None,
    report: DeviceReport,
    endpoint: Endpoint | None = None,
) -> wire.Begin:
    """Describes the model; returns when the run begins, or goes on, with this process."""
    lead = run.rank == 0 and not (run.folder / BEGUN).exists()
    if lead:
        leave_model(run.folder, model)
    described = wire.Describe(
        run.rank,
        run.incarnation,
        model.digest(policy),
        model.layout if lead else None,
        model.optimizer if lead else None,
        str(policy) if policy is not None else None,
        model.aliases,
        endpoint,
        ModelDevice(report.name, report.problem),
        model.local_steps,
    )
    run.send(described)
    begin = await_begin(run)
    report.remove_probe()
    run.epoch_s = begin.epoch_s
    if not lead or begin.resumed:
        take_others(run.folder, model)
    return begin


def leave_model(folder: Path, model: ModelDescription) -> None:
    """Leaves what the run starts from where the servers and the other workers find it."""
    for file in (
        shared_memory.WHOLE,
        shared_memory.AVERAGE,
        shared_memory.INITIAL_STATE,
    ):  # of a worker 0 that failed before the run began
        (folder / file).unlink(missing_ok=True)
    flatten(model.tensors, model.layout.views(shared_memory.create(folder / shared_memory.WHOLE, model.layout)))
    if model.optimizer.extras.ema is not None:
        shared_memory.create(folder / shared_memory.AVERAGE, model.layout)
    if model.state[THERE].any():
        save_file(model.state, folder / shared_memory.INITIAL_STATE)
    save_file(contiguous(model.others), folder / "others")


def take_others(folder: Path, model: ModelDescription) -> None:
    """Takes what is not trained (frozen parameters, buffers) from worker 0."""
    theirs = load_file(folder / "others")
    strange = theirs.keys() ^ model.others.keys()
    if strange:
        raise PacelineError(
            f"{min(strange)}, which is not trained, is not there on every worker or in the checkpoint: "
            "build the same model everywhere"
        )
    with torch.no_grad():
        for name, tensor in model.others.items():
            put(tensor, theirs[name])


def await_begin(run: RunConnection) -> wire.Begin:
    """Returns how the run begins with this process, once the driver says so."""
    while True:
        run.waiter.wait(IDLE_S)
        while (message := run.driver.receive()) is not None:
            match wire.decode_to_worker(message):
                case wire.Begin() as begin:
                    return begin
                case wire.Refuse(reason):
                    raise PacelineError(printable(reason))
                case wire.Stop():
                    raise Stopped
