"""The driver of a live run: starts the processes, numbers the views, and notices everything.

It is the one authority on membership. A worker that ends, in whatever way, makes its sentinel readable at
once; the next view goes to the shards within a millisecond, and whoever waited for it is released by them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from paceline import run_folder
from paceline.core.messages import Members
from paceline.run import INTERRUPTED, Point, Run
from paceline.runtime.live.driver.assembly import assemble
from paceline.runtime.live.driver.peer_results import final_of_peers
from paceline.runtime.live.driver.results import Outcome, collect_results
from paceline.runtime.live.driver.run_plan import OpenRun, RunPlan
from paceline.runtime.live.driver.worker_output import print_error
from paceline.runtime.live.storage import shared_memory
from paceline.runtime.live.storage.trace_files import tracing

__all__ = ["Driver", "RunPlan"]

TICK_S = 0.2


class Driver:
    """One live run, which has its resources from the start: `run` it, or `close` it. `say` and `say_error` get lines
    for a person, `watch` each point of the history."""

    def __init__(
        self,
        plan: RunPlan,
        say: Callable[[str], None] = print,
        watch: Callable[[Point], None] | None = None,
        say_error: Callable[[str], None] = print_error,
    ) -> None:
        plan.check()
        self.made_s = time.monotonic()
        self.plan = plan
        with contextlib.ExitStack() as opened:
            folder = shared_memory.RunFolder()
            opened.callback(folder.remove)
            self.traces = opened.enter_context(tracing(folder.path, self._kept_folder()))
            self.parts = assemble(plan, folder.path, self.traces, opened, say, watch, say_error)
            self.say = self.parts.feed.telling(say)
            self.resources = opened.pop_all()

    def _kept_folder(self) -> Path | None:
        return self.plan.checkpointing.folder if self.plan.checkpointing is not None else None

    def run(self) -> Run:
        """Does the run; returns what came of it."""
        parts, kept = self.parts, self._kept_folder()
        parts.interrupts.catch()
        try:
            if kept is not None:
                try:
                    run_folder.write_live(kept, parts.folder)
                except OSError as error:
                    self.say(f"WARNING: paceline servers will not find this run: {error}; training goes on")
            return self._run()
        finally:
            parts.interrupts.ignore()
            self.close()
            if kept is not None:
                with contextlib.suppress(OSError):  # what was trained is worth more
                    (kept / run_folder.LIVE).unlink(missing_ok=True)
            parts.interrupts.restore()

    def close(self) -> None:
        """Ends all processes, and leaves nothing behind."""
        self.parts.children.kill_all()
        if self.parts.checkpointer is not None:
            self.parts.checkpointer.close()
        self.plan.starter.close()
        self.resources.close()

    def _run(self) -> Run:
        parts = self.parts
        try:
            self._start()
            while not self.done:
                self.turn()
            if parts.conversations is not None:
                parts.conversations.await_ended()
            for child in list(parts.children.values()):
                parts.ended(child)
            parts.coordinators.close()
            parts.guard.look()
            parts.durability.tell_cost()
            for loss in parts.server_restarts.machine.losses:
                self.say(loss)
            return self._collect()
        finally:
            parts.coordinators.close()
            if parts.conversations is not None:
                parts.conversations.say_goodbye(failed=not self.done or bool(parts.finishing.outcomes.failures))
            parts.children.output.close_all()

    def _start(self) -> None:
        parts = self.parts
        if parts.conversations is not None:
            hosts, state = parts.conversations.hosts, parts.state
            self.plan.opened(OpenRun(hosts, state, parts.interrupts, self.say, parts.worker_restarts.may_start))
        parts.servers.start()
        for rank in range(self.plan.members.workers if parts.conversations is None else 0):
            parts.workers.start(rank)

    @property
    def done(self) -> bool:
        return self.parts.state.finishing and self.parts.servers.all_finished

    def turn(self) -> None:
        """Wait for something to happen, and deal with it."""
        parts = self.parts
        ready = parts.mailbox.wait(parts.coordinators.until_timer(TICK_S))
        parts.mailbox.hear_all()
        if parts.conversations is not None:
            parts.conversations.hear()
            parts.conversations.tick()
            self.plan.tick()
        # What is printed first: a process that ends may have another started, whose sentinel takes a free number.
        parts.children.output.hear_all(ready)
        for child in parts.children.ended(ready):
            parts.ended(child)
        parts.coordinators.fire_timers()
        for tick in parts.ticks:
            tick()
        if parts.interrupts and not parts.state.begun:
            raise KeyboardInterrupt
        if parts.interrupts and not parts.state.stopping:
            self.say("stopping after the current iterations; once more to stop at once")
            parts.workers.stop("interrupted", INTERRUPTED)
        if not parts.state.begun:
            parts.beginning.consider()
        self._consider_finishing()

    def _consider_finishing(self) -> None:
        """Finish when nobody is left who trains, and nobody will come."""
        parts = self.parts
        if parts.workers.live() or parts.worker_restarts.due:
            if parts.checkpointer is not None:
                parts.checkpointer.worker_is_there()
        elif not parts.state.finishing and not self._may_come_back():
            parts.finishing.finish()

    def _may_come_back(self) -> bool:
        conversations, outcomes = self.parts.conversations, self.parts.finishing.outcomes
        return conversations is not None and conversations.arrivals.may_come_back(ended_well=outcomes.well > 0)

    def _collect(self) -> Run:
        parts, plan = self.parts, self.plan
        state, peers = parts.state, parts.state.without_servers
        outcome = Outcome(
            Members(plan.members.workers, 0) if peers else plan.members,
            parts.logged.history,
            plan.target,
            parts.logged.reached_s,
            parts.finishing.outcomes.failures,
            parts.resizing.changes,
            state.ending,
            parts.coordinators.clips_mean,
        )
        final = final_of_peers(parts.folder, state.model.layout) if peers else None
        run = collect_results(state.model, plan.seed, outcome, parts.folder, final)
        startup_s = state.epoch_s - self.made_s
        whole_s = time.monotonic() - self.made_s
        run.wall = {
            "startup_s": startup_s,
            "training_s": run.time_s,
            "ending_s": max(0.0, whole_s - startup_s - run.time_s),
        }
        parts.feed.end(run)
        return run
