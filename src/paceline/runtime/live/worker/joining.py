"""How a worker comes into a live run: it describes its model, waits for the servers, and takes the first parameters.

Worker 0 of a run that has not begun leads: its values, its optimizer's state and what is not trained are the run's,
and it leaves them in the run's folder. Everybody else, and worker 0 should it come again, only says what it has.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from safetensors.torch import load_file, save_file

from paceline import policies
from paceline.core.events import ViewChanged
from paceline.core.messages import Node
from paceline.core.policy import Policy
from paceline.core.speculation import SpeculativeWorker
from paceline.core.worker import Worker
from paceline.errors import PacelineError
from paceline.runtime.driver import Seat
from paceline.runtime.live import memory, wire
from paceline.runtime.live.configuration import Door
from paceline.runtime.live.process import Stopped, give_way
from paceline.runtime.live.recording import TraceFile
from paceline.runtime.live.worker.aborting import Aborting, tell_ignored
from paceline.runtime.live.worker.description import Described, contiguous
from paceline.runtime.live.worker.overlap import Overlap
from paceline.runtime.live.worker.segments import Segments
from paceline.tensors.layout import flatten, put
from paceline.tensors.slices import THERE
from paceline.tensors.steppers import Hyper

if TYPE_CHECKING:
    from paceline.runtime.live.peer.peer import LivePeer
    from paceline.runtime.live.worker.worker import LiveWorker

IDLE_S = 0.2
BEGUN = "begun"
"""A file that is there once the run has begun: then worker 0, should it come again, is a joiner like any other."""


def join(worker: LiveWorker, model: Described, policy: Policy | None, overlap: bool) -> tuple[Hyper, ...] | None:
    """Have the worker's model hold the first parameters; the run's hyper-parameters by now, if it joins late."""
    worker.model = model
    worker.layout = layout = model.layout
    worker.segments = Segments(worker.folder, worker.rank, worker.incarnation, layout, model.tensors, overlap)
    worker.transfer = worker.segments.transfer
    worker.talk.sent_hyper = model.optimizer.groups
    begin = introduce(worker, model, policy)
    config = worker.config
    if config.abroad is None or not config.abroad.near:  # else how many of them are on this host is not known
        give_way(config.members.workers + config.members.servers)
    start(worker, begin)
    worker.segments.adopt()
    worker.changes = [tensor._version for tensor in model.tensors]
    if overlap:
        names = [entry.name for entry in layout.entries]
        sending = worker.talk if worker.segments.in_place else None
        worker.overlap = Overlap(model.tensors, names, worker.transfer, sending)
    if isinstance(worker.machine, SpeculativeWorker):
        if overlap:
            tell_ignored(worker.rank, "overlap=True")
        else:
            worker.aborting = Aborting(worker, model.tensors, model.module)
    if begin.hyper is not None:
        worker.talk.sent_hyper = begin.hyper
    return begin.hyper


def introduce(
    worker: LiveWorker | LivePeer, model: Described, policy: Policy | None, door: Door | None = None
) -> wire.Begin:
    """Describe the model; return when the run begins, or goes on, with this worker."""
    lead = worker.rank == 0 and not (worker.folder / BEGUN).exists()
    if lead:
        leave_model(worker.folder, model)
    described = wire.Describe(
        worker.rank,
        worker.incarnation,
        model.digest(policy),
        model.layout if lead else None,
        model.optimizer if lead else None,
        str(policy) if policy is not None else None,
        model.aliases,
        door,
    )
    worker.driver.send(wire.encode(described))
    begin = await_begin(worker)
    worker.hands.open()
    if not lead or begin.resumed:
        take_others(worker.folder, model)
    return begin


def start(worker: LiveWorker, begin: wire.Begin) -> None:
    """Make the machine, and return when it has the parameters of its first iteration."""
    worker.epoch_s = begin.epoch_s
    worker.talk.meet(begin.assignment, begin.doors)
    machine = policies.parse(begin.policy).machine("worker", worker.rank, worker.config.members, worker.config.seed)
    assert isinstance(machine, Worker)
    worker.machine = machine
    node = Node("worker", worker.rank)
    worker.trace = TraceFile(Path(worker.config.output), node, worker.incarnation)
    worker.seat = Seat(node, worker.incarnation, machine, worker, worker.trace.write)
    if begin.changed is not None:
        worker.seat.tell(msgspec.structs.replace(begin.changed, at=worker.now()))
    worker.seat.tell(ViewChanged(worker.now(), begin.view))
    worker.flush()
    worker.await_parameters()


def leave_model(folder: Path, model: Described) -> None:
    """Leave what the run starts from where the servers and the other workers find it."""
    for file in (memory.WHOLE, memory.AVERAGE, memory.INITIAL_STATE):  # of a worker 0 that failed before the run began
        (folder / file).unlink(missing_ok=True)
    flatten(model.tensors, model.layout.views(memory.create(folder / memory.WHOLE, model.layout)))
    if model.optimizer.extras.ema is not None:
        memory.create(folder / memory.AVERAGE, model.layout)
    if model.state[THERE].any():
        save_file(model.state, folder / memory.INITIAL_STATE)
    save_file(contiguous(model.others), folder / "others")


def take_others(folder: Path, model: Described) -> None:
    """What is not trained (frozen parameters, buffers) starts as worker 0 has it."""
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


def await_begin(worker: LiveWorker | LivePeer) -> wire.Begin:
    while True:
        worker.waiter.wait(IDLE_S)
        while (message := worker.driver.receive()) is not None:
            match wire.decode_to_worker(message):
                case wire.Begin() as begin:
                    return begin
                case wire.Refuse(reason):
                    raise PacelineError(reason)
                case wire.Stop():
                    raise Stopped
