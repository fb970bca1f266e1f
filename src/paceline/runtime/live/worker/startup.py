"""How a worker begins: it introduces itself, makes its machine, and takes the first parameters from the servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from paceline.core.events import ViewChanged
from paceline.core.policy import Policy
from paceline.core.speculation import SpeculativeWorker
from paceline.core.worker import Worker
from paceline.errors import PacelineError, printable
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.driver_texts import policy_of
from paceline.runtime.live.storage import abort_flag
from paceline.runtime.live.storage.abort_flag import AbortFlag
from paceline.runtime.live.system.process_setup import give_way
from paceline.runtime.live.system.training_end import Stopped
from paceline.runtime.live.trainer.device_report import DeviceReport, probe_name
from paceline.runtime.live.trainer.model_description import ModelDescription
from paceline.runtime.live.trainer.run_connection import RunConnection
from paceline.runtime.live.trainer.startup import introduce
from paceline.runtime.live.worker import cuda_copies
from paceline.runtime.live.worker.abortable_step import AbortableStep, tell_ignored
from paceline.runtime.live.worker.pinned_memory import PinnedMemory
from paceline.runtime.live.worker.shared_device_memory import SharedDeviceMemory
from paceline.runtime.live.worker.worker import LiveWorker
from paceline.runtime.live.worker.worker_executor import WorkerExecutor
from paceline.runtime.live.worker.worker_memory import HostMemory, WorkerMemory
from paceline.tensors.layout import Layout


def begin_worker(
    run: RunConnection, model: ModelDescription, policy: Policy | None, overlap: bool
) -> tuple[LiveWorker, wire.Begin]:
    """A worker whose model holds the first parameters, and how the run begins, or goes on, with it."""
    place = (run.folder, (run.rank, run.incarnation), model.layout, model.tensors)
    probe = run.folder / probe_name(run.rank, run.incarnation)
    report = DeviceReport(model.tensors, probe, wanted=run.config.servers_on != "cpu")
    # Made before the run begins: if there is no room for it, none does.
    memory: WorkerMemory | None = memory_for(*place, overlap) if report.device is None else None
    begin = introduce(run, model, policy, report)
    if memory is None and report.device is not None and all(each.device for each in begin.endpoints):
        common = all(each.common and each.device == report.name for each in begin.endpoints)
        memory = SharedDeviceMemory(*place, report.device, report.segments, common)
    elif memory is None:
        memory = memory_for(*place, overlap)
    config = run.config
    if (
        config.multihost is None or not config.multihost.shared_memory
    ):  # else how many of them are on this host is not known
        give_way(config.members.workers + config.members.servers)
    executor = WorkerExecutor(run, make_machine(run, begin, policy), memory)
    executor.connections.sent_hyper = model.optimizer.groups
    take_first_parameters(executor, begin)
    memory.begin()
    executor.clock.introduce(executor.connections.kinds())
    if begin.hyper is not None:
        executor.connections.sent_hyper = begin.hyper
    return LiveWorker(model, executor, make_abortable(executor, model, overlap)), begin


def memory_for(
    folder: Path, process: tuple[int, int], layout: Layout, tensors: Sequence[Tensor], overlap: bool
) -> WorkerMemory:
    """Returns the memory that suits the devices on which these tensors are."""
    copy_streams = cuda_copies.copy_streams_for(tensors)
    if not copy_streams and all(tensor.device.type == "cpu" for tensor in tensors):
        return HostMemory(folder, process, layout, tensors, overlap)
    return PinnedMemory(folder, process, layout, tensors, overlap, copy_streams)


def take_first_parameters(executor: WorkerExecutor, begin: wire.Begin) -> None:
    """Connects to the servers, and returns when their parameters are in the model."""
    run = executor.run
    executor.connections.connect_all(begin.assignment, begin.endpoints)
    if begin.changed is not None:
        executor.runner.deliver(msgspec.structs.replace(begin.changed, at=run.now()))
    executor.runner.deliver(ViewChanged(run.now(), begin.view))
    executor.flush()
    executor.await_order()
    executor.orders.hear_if_due()
    if executor.orders.participation.stopping:
        raise Stopped(whole=True)


def make_abortable(executor: WorkerExecutor, model: ModelDescription, overlap: bool) -> AbortableStep | None:
    """Returns what interrupts computations, if the policy gives some up and the script allows it."""
    if not isinstance(executor.machine, SpeculativeWorker):
        return None
    run = executor.run
    if overlap or model.rounded:
        tell_ignored(run.rank, "overlap=True" if overlap else "parameters in half precision")
        return None
    flag = AbortFlag(abort_flag.path(run.folder, run.rank, run.incarnation), create=True)
    return AbortableStep(executor, executor.orders.participation.leases, flag, run.rank, model.tensors, model.module)


def make_machine(run: RunConnection, begin: wire.Begin, policy: Policy | None) -> Worker:
    """The machine of this worker under the policy that the driver names; `policy` is the script's own."""
    config = run.config
    machine = policy_of(begin.policy, config, policy).machine("worker", run.rank, config.members, config.seed)
    if not isinstance(machine, Worker):
        raise PacelineError(f"the driver names a policy for this worker that is none: {printable(begin.policy)}")
    return machine
