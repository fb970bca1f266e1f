"""Carries out what a shard's machine orders: steps on gradients, answers with parameters, timers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from heapq import heappop, heappush

from torch import Tensor

from paceline.core.actions import Answer, Apply, Drop, Measure, Park, Send, SetTimer
from paceline.core.messages import Rise, SliceNorm
from paceline.core.push_weights import shares_of
from paceline.core.shard import Shard
from paceline.runtime.execution import NoSuchAction
from paceline.runtime.live.messaging.senders import Process
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.server.connection import ServerConnection
from paceline.runtime.live.server.push_batching import WORTH_IT, DeferredSteps, PushPacing
from paceline.runtime.live.server.shard_state import ShardState
from paceline.runtime.live.server.turn_clock import TurnClock
from paceline.runtime.live.server.worker_buffer import SegmentBuffer, WorkerBuffer
from paceline.runtime.live.server.worker_buffers import WorkerBuffers


class ShardExecutor:
    """Does what one shard's machine orders."""

    def __init__(
        self, run: ServerConnection, machine: Shard, state: ShardState, buffers: WorkerBuffers, journalled: bool
    ) -> None:
        self.run = run
        self.machine = machine
        self.state = state
        self.buffers = buffers
        self.defers = not journalled and run.remote is None
        """Whether steps may be taken a little later, with others."""
        self.deferred = DeferredSteps()
        self.pacing = PushPacing()
        self.waits: dict[int, str] = {}
        """Why each parked worker waits."""
        self.staleness: dict[int, int] = {}
        self.timers: list[tuple[float, int]] = []
        """(when, which), the next first."""
        self.asked: set[Process] = set()
        """Who has asked this incarnation of the server for parameters."""
        self.checkpoint_every: int | None = None
        self.clock = TurnClock(run)

    # Steps.

    def apply(self, action: Apply) -> None:
        if self.defer(action):
            return
        self.flush_deferred()
        gradients: list[Sequence[Tensor]] = []
        absent: list[frozenset[int]] = []
        used: list[WorkerBuffer] = []
        for handle in action.handles:
            kept = self.buffers.kept.pop(handle, None)
            if kept is not None:
                gradients.append(kept[0])
                absent.append(kept[1])
            else:
                used.append(self.buffers.holding(handle))
                gradients.append(used[-1].gradient)
                absent.append(used[-1].absent)
        # The gradients are used up, and the memory is ours until we answer: the new values may go there at once.
        targets = [target for buffer in used for target in buffer.parameters.targets]
        spoil = bool(used) and used[0].may_overwrite and gradients[0] is used[0].gradient
        shares = shares_of(action.handles)
        self.state.optimizer.apply(gradients, action.weight, absent, targets, spoil, action.norm, shares)
        for buffer in used:
            buffer.parameters.version = action.version
        self.note(action)

    def note(self, action: Apply) -> None:
        """The step is taken."""
        self.clock.stepped(len(action.handles))
        for handle in action.handles:
            self.staleness[handle.source] = action.staleness(handle)
        if self.checkpoint_every and action.version % self.checkpoint_every == 0:
            self.run.tell(wire.Due())

    def measure(self, action: Measure) -> None:
        self.flush_deferred()
        gradients = [self.buffers.pieces(handle) for handle in action.handles]
        squared = self.state.optimizer.measure(gradients, shares_of(action.handles))
        self.tell_norm(SliceNorm(self.run.shard, action.iteration, squared))

    def drop(self, action: Drop) -> None:
        self.buffers.kept.pop(action.handle, None)

    # Steps taken together (`push_batching.py`).

    def defer(self, step: Apply) -> bool:
        """Returns whether this step is taken later, with others."""
        buffer = self.deferrable(step) if self.deferred.taking else None
        if buffer is None:
            self.pacing.patience_s = 0.0
            return False
        if self.deferred.is_full:
            self.flush_deferred()
        self.deferred.steps.append((step, buffer))
        return True

    def deferrable(self, step: Apply) -> SegmentBuffer | None:
        """Returns the memory of this step's gradient and values; None if it cannot be taken with others."""
        optimizer = self.state.optimizer
        if not self.defers or optimizer.clip_mean is not None:
            return None
        if not optimizer.can_step_on_each or len(optimizer.values) < WORTH_IT:
            return None
        if len(step.handles) > 1 or step.handles[0] in self.buffers.kept:
            return None
        buffer = self.buffers.holding(step.handles[0])
        return buffer if isinstance(buffer, SegmentBuffer) and not buffer.absent else None

    def flush_deferred(self) -> None:
        """Carries out everything that was deferred."""
        if not self.deferred.steps:
            return
        (steps, answers), began = self.deferred.take(), time.monotonic()
        gradients, weights = [buffer.gradient for _, buffer in steps], [step.weight for step, _ in steps]
        waiting = {step.handles[0].source for step, _ in steps} | self.waits.keys()
        all_wait = len(waiting) >= len(self.buffers.members)
        self.state.optimizer.apply_each(gradients, weights, all_wait=all_wait)
        self.pacing.patience_s = time.monotonic() - began if self.is_crowded() else 0.0
        for step, buffer in steps:
            buffer.parameters.version = step.version
            self.note(step)
        for answer in answers:
            self.answer(answer)

    def is_crowded(self) -> bool:
        """Whether there are fewer cores than processes here, as far as is known: on how many hosts they are is not."""
        processes = len(self.buffers.members) + len(self.state.assignment)
        return self.run.config.multihost is None and processes > len(os.sched_getaffinity(0))

    # Answers.

    def answer(self, action: Answer) -> None:
        if self.deferred.steps:
            if self.deferred.waits_for_last(action):
                self.deferred.answers.append(action)
                return
            self.flush_deferred()
        parameters = action.parameters
        process = (parameters.worker, parameters.incarnation)
        self.waits.pop(parameters.worker, None)
        if process not in self.asked:
            return  # it asked another incarnation of this server, and asks again
        try:
            buffer = self.buffers.of(process)
        except FileNotFoundError:
            return  # it is gone, and a view will say so
        if self.machine.held:
            self.buffers.keep(process, buffer, self.machine.held_handles())
        buffer.parameters.write_back(self.state.optimizer.values, parameters.version)
        buffer.reply(parameters)
        self.clock.answers += 1

    def park(self, action: Park) -> None:
        self.waits[action.pull.worker] = action.reason

    def send(self, action: Send) -> None:
        match action.message:
            case Rise() as rise:
                self.run.tell(wire.Ask(rise))
            case SliceNorm() as norm:
                self.tell_norm(norm)
            case _:
                raise NoSuchAction(f"a server cannot {action}")

    def tell_norm(self, norm: SliceNorm) -> None:
        self.run.tell(wire.Measured(norm.shard, norm.iteration, norm.squared))

    # Timers.

    def set_timer(self, action: SetTimer) -> None:
        heappush(self.timers, (self.run.now() + action.after_s, action.timer))

    def until_timer(self, at_most_s: float) -> float:
        """How long to wait for a message."""
        return min(at_most_s, max(0.001, self.timers[0][0] - self.run.now())) if self.timers else at_most_s

    def next_timer_due(self) -> int | None:
        """The timer that has run out, if one has; it is not told again."""
        return heappop(self.timers)[1] if self.timers and self.timers[0][0] <= self.run.now() else None
