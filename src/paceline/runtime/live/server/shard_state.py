"""What a server holds of the parameters: its part, and the optimizer that steps it; where that comes from and goes.

It begins with worker 0's values, with a checkpoint, with what other servers have given away
(`server/shard_transfer.py`), or with what its last incarnation has logged (`server/log_replay.py`). When the number of
servers changes its part does, too. At the end the values go where the driver finds them.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.events import Restored, ServersChanged
from paceline.core.policy import CentralPolicy, Policy
from paceline.errors import PacelineError
from paceline.runtime.live.protocol import resizing_messages, wire
from paceline.runtime.live.server import device_steps, shard_transfer
from paceline.runtime.live.server.log_replay import Rebuilt
from paceline.runtime.live.server.worker_buffer import (
    ParameterCopy,
    Reply,
    SegmentBuffer,
    SeparateBuffer,
    SharedParameters,
    SpareBuffer,
    WorkerBuffer,
    ranges_of,
    scatter,
)
from paceline.runtime.live.storage import checkpoint, shared_memory
from paceline.runtime.live.storage.device_segments import DeviceSegments, MemoryDevice
from paceline.tensors import state
from paceline.tensors.assignment import Ranges
from paceline.tensors.device_optimizer import DeviceOptimizer, SliceOptimizer
from paceline.tensors.piece_optimizers import Hyper, State
from paceline.tensors.shard_optimizer import ShardOptimizer, ThreadCounts


class ShardState:
    """One server's part of the parameters, and the optimizer that steps it."""

    def __init__(
        self,
        folder: Path,
        shard: int,
        order: wire.Configure,
        workers: int,
        rebuilt: Rebuilt | None = None,
        may_share: bool = False,
        device: MemoryDevice | None = None,
    ) -> None:
        self.optimizer: SliceOptimizer
        self.folder = folder
        self.shard = shard
        self.workers = workers
        self.device = device
        """The device that steps; None for the CPU."""
        self.segments = DeviceSegments()
        self.layout = order.layout
        self.assignment = order.assignment
        self.spec = order.optimizer
        self.hyper: tuple[Hyper, ...] | None = None
        """What the hyper-parameters were changed to."""
        self.first: Restored | ServersChanged | None = None
        """What a shard's machine that begins with this is to be told first."""
        self.common = False
        """The parameters are stepped where all workers read them."""
        if rebuilt is not None:
            self.spec, self.hyper, self.optimizer = rebuilt.meta.optimizer, rebuilt.hyper, rebuilt.optimizer
        else:
            values, learned = self._begin(order)
            if may_share:
                values = self._share(values)
            else:
                self.unshare()
            self._hold(values, learned)

    @property
    def part(self) -> Ranges:
        """What this server has of the parameters."""
        return self.assignment[self.shard]

    def _begin(self, order: wire.Configure) -> tuple[Tensor, State]:
        if order.reslice is not None:
            self.first = order.reslice.event
            return shard_transfer.take(self.folder, order.reslice.give, self.shard, self.layout, None)
        if order.checkpoint is not None:
            return self._restore(Path(order.checkpoint))
        whole = shared_memory.attach(self.folder / shared_memory.WHOLE, self.layout)
        initial = self.folder / shared_memory.INITIAL_STATE
        learned = state.cut(load_file(initial), self.layout, self.part) if initial.exists() else {}
        return torch.cat([whole[start:stop] for start, stop in self.part] or [whole[:0]]), learned

    def _restore(self, path: Path) -> tuple[Tensor, State]:
        manifest = checkpoint.read(path)
        same = checkpoint.assignment_of(manifest) == self.assignment
        mine = manifest.shards[self.shard : self.shard + 1] if same else manifest.shards
        self.first = Restored(0.0, min(each.iteration for each in mine), max(each.version for each in mine))
        return checkpoint.load_part(path, manifest, self.part)

    def _share(self, values: Tensor) -> Tensor:
        """The same where all workers can read it, if there is room for that."""
        path = self.folder / shared_memory.COMMON
        with contextlib.suppress(PacelineError, OSError):
            if self.device is not None:
                common = self.segments.create(path, self.layout, self.device)
            else:
                common = shared_memory.create(path, self.layout)
            self.common = True
            return common.copy_(values)
        return values

    def unshare(self) -> None:
        """From now on everybody has their own. Those who still read what was shared have it mapped."""
        self.common = False
        (self.folder / shared_memory.COMMON).unlink(missing_ok=True)

    def _hold(self, values: Tensor, learned: State) -> None:
        """Step this part of the parameters from now on."""
        if self.device is not None:
            self.optimizer = DeviceOptimizer(self.layout, self.part, values.to(self.device.place), self.spec)
        else:
            threads = ThreadCounts.of(len(self.assignment), self.workers)
            self.optimizer = ShardOptimizer(self.layout, self.part, values, self.spec, threads)
        if self.hyper is not None:
            self.optimizer.set_hyper(self.hyper)
        if learned:
            self.optimizer.load_state(learned)

    def set_hyper(self, hyper: tuple[Hyper, ...]) -> None:
        self.optimizer.set_hyper(hyper)
        self.hyper = hyper

    def give(self, order: resizing_messages.Give) -> None:
        """Leave in the run's folder what is to be others'."""
        shard_transfer.give(self.folder, order, self.shard, self.layout, self.optimizer)

    def reslice(self, order: resizing_messages.Give) -> None:
        """Have another part from now on, of what this server keeps and what others gave."""
        values, learned = shard_transfer.take(self.folder, order, self.shard, self.layout, self.optimizer)
        self.optimizer.close()
        self.assignment = order.after
        self.unshare()
        self._hold(values, learned)

    def open_buffer(self, worker: int, incarnation: int, reply: Reply) -> WorkerBuffer:
        """Returns this part of a worker's shared memory."""
        if self.device is not None:
            assert isinstance(self.optimizer, DeviceOptimizer)
            process = (worker, incarnation)
            return device_steps.open_buffer(
                self.folder, self.layout, self.part, self.optimizer, self.device, process, reply
            )
        whole = shared_memory.attach(shared_memory.segment_path(self.folder, worker, incarnation), self.layout)
        parameters = SharedParameters() if self.common else ParameterCopy(whole, self.part, self.optimizer)
        path = shared_memory.staging_path(self.folder, worker, incarnation)
        if path.exists():
            staging = shared_memory.attach(path, self.layout)
            return SeparateBuffer(staging, self.part, self.optimizer, parameters, reply)
        if self.common:
            return SpareBuffer(whole, self.part, self.optimizer, parameters, reply)
        return SegmentBuffer(whole, self.part, self.optimizer, reply)

    def hand_over(self, file: str) -> str:
        """Leave the optimizer's state in this file of the run's folder; why that failed, or ""."""
        try:
            save_file(self.optimizer.state(), self.folder / Path(file).name)
        except (OSError, SafetensorError) as problem:
            return str(problem)
        return ""

    def leave(self) -> None:
        """Leave the final values where the driver finds them."""
        final = shared_memory.attach(self.folder / shared_memory.WHOLE, self.layout)
        scatter(self.optimizer.values, ranges_of(final, self.part))
        if self.optimizer.average is not None:
            average = shared_memory.attach(self.folder / shared_memory.AVERAGE, self.layout)
            scatter(self.optimizer.average, ranges_of(average, self.part))


def may_share(order: wire.Configure, policy: Policy) -> bool:
    """Whether workers on this host may read the parameters where they are stepped: nobody computes then.

    Not those of a durable server: what it has stepped must not be seen if it dies before that is in its log.
    """
    alone = len(order.assignment) == 1 and order.reslice is None and order.journal is None
    return alone and isinstance(policy, CentralPolicy) and policy.in_step
