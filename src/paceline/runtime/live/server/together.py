"""Pushes that have come together are stepped on together.

Under a policy that applies each gradient on arrival a server goes through all its parameters for each: it reads them,
steps, writes them, and writes them to the worker. If more pushes wait meanwhile, it goes through them once for all of
those, piece by piece: the parameters are read and written once. Machines and workers cannot tell: steps are in the same
order, and each worker gets the values after its own. But the first of them waits for the last, so they are few.

Only while messages of workers are taken, one after the other, is anything put off: nothing is left when the server
obeys the driver, or a timer, or waits. Whatever else looks at the parameters meanwhile has it caught up first.

Where there are fewer cores than processes, a server that has a push and could step takes a core from a worker that
computes. So it lets those who run go first, for as long as the last pass took at most, and finds more pushes waiting.
Whoever runs may be no worker, or one that is far from its next push: a server that has waited in vain does so less.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from paceline.core.actions import Answer, Apply
from paceline.runtime.live.process import others_run
from paceline.runtime.live.server.mapped import Segment

if TYPE_CHECKING:
    from paceline.runtime.live.server.server import LiveServer

MOST = 4
"""Steps taken together."""
WORTH_IT = 1 << 21
"""Parameters at least: with a million nothing was gained, they are in the cache anyway."""
PAUSE_S = 0.0005
"""Between two looks at whether others run."""
LONGEST_REST = 64
"""Passes without waiting, at most, after some in which it was in vain."""


class Together:
    """What a server has been ordered to do and does a little later."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.steps: list[tuple[Apply, Segment]] = []
        self.answers: list[Answer] = []
        """To those whose steps these are."""
        self.taking = False
        """Messages of workers are being taken."""
        self.patience_s = 0.0
        """How long to wait for more of them: as long as the last pass took, if it could have been for more."""
        self.rest = self.resting = 0
        """For how many passes not to wait after a wait in vain, and for how many still."""

    def take_messages(self) -> None:
        """Take what workers have said."""
        if self.patience_s:
            self.let_others_run()
        self.taking = True
        while (received := self.server.listener.receive()) is not None:
            self.server.take(*received)
        self.catch_up()
        self.taking = False

    def let_others_run(self) -> None:
        """Wait for more pushes while anybody computes who may send one, but no longer than is worth it."""
        if self.resting:
            self.resting -= 1
            return
        server, until = self.server, time.monotonic() + self.patience_s
        inbox, most = server.listener.inbox, min(MOST, len(server.alive) - len(server.waits))
        before, waited = len(inbox), False
        while len(inbox) < most and time.monotonic() < until and others_run():
            waited = True
            if server.driver in server.waiter.wait(PAUSE_S):
                break
        if len(inbox) > before:
            self.rest = 0
        elif waited:
            self.rest = self.resting = min(LONGEST_REST, 2 * self.rest + 1)

    def is_crowded(self) -> bool:
        """Whether there are fewer cores than processes here, as far as is known: on how many hosts they are is not."""
        server = self.server
        processes = len(server.alive) + len(server.holding.assignment)
        return server.config.abroad is None and processes > len(os.sched_getaffinity(0))

    def put_off(self, step: Apply) -> bool:
        """Whether this step is taken later, with others."""
        segment = self.segment_of(step) if self.taking else None
        if segment is None:
            self.patience_s = 0.0
            return False
        if len(self.steps) == MOST:
            self.catch_up()
        self.steps.append((step, segment))
        return True

    def segment_of(self, step: Apply) -> Segment | None:
        """Where its gradient is, and its values are to be; None if this step cannot be taken with others."""
        server, optimizer = self.server, self.server.holding.optimizer
        if not optimizer.is_plain or len(optimizer.values) < WORTH_IT:
            return None
        if server.journal is not None or server.receiving is not None:
            return None
        if len(step.handles) > 1 or step.handles[0] in server.kept:
            return None
        handle = step.handles[0]
        segment = server.segments[handle.source, handle.incarnation]
        if segment.absent or segment.shows_servers or segment.gradient is not segment.pieces:
            return None
        return segment

    def put_off_answer(self, answer: Answer) -> bool:
        """Whether this answer is given later, when the step it waits for is taken."""
        if not self.steps:
            return False
        last, parameters = self.steps[-1][0], answer.parameters
        worker = (last.handles[0].source, last.handles[0].incarnation)
        if (parameters.worker, parameters.incarnation) != worker or parameters.version != last.version:
            self.catch_up()
            return False
        self.answers.append(answer)
        return True

    def catch_up(self) -> None:
        """Do all that was put off."""
        if not self.steps:
            return
        steps, self.steps = self.steps, []
        answers, self.answers = self.answers, []
        gradients, weights = [segment.pieces for _, segment in steps], [step.weight for step, _ in steps]
        server, began = self.server, time.monotonic()
        waiting = {step.handles[0].source for step, _ in steps} | server.waits.keys()
        server.holding.optimizer.apply_each(gradients, weights, all_wait=len(waiting) >= len(server.alive))
        self.patience_s = time.monotonic() - began if self.is_crowded() else 0.0
        for step, segment in steps:
            segment.holds = step.version
            server.note(step)
        for answer in answers:
            server.answer(answer)
