"""Pushes that have come together are stepped on together.

Under a policy that applies each gradient on arrival a server goes through all its parameters for each: it reads them,
steps, writes them, and writes them to the worker. If more pushes wait meanwhile, it goes through them once for all of
those, piece by piece: the parameters are read and written once. Machines and workers cannot tell: steps are in the same
order, and each worker gets the values after its own. But the first of them waits for the last, so they are few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.actions import Answer, Apply
from paceline.runtime.live.server.mapped import Segment

if TYPE_CHECKING:
    from paceline.runtime.live.server.server import LiveServer

MOST = 4
"""Steps taken together."""
WORTH_IT = 1 << 19
"""Parameters at least: fewer are in the cache anyway."""


class Together:
    """What a server has been ordered to do and does a little later: nothing is left when it waits for messages."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.steps: list[tuple[Apply, Segment]] = []
        self.answers: list[Answer] = []
        """To those whose steps these are."""

    def put_off(self, step: Apply) -> bool:
        """Whether this step is taken later, with others."""
        server = self.server
        if not (self.steps or server.listener.inbox) or len(step.handles) > 1:
            return False
        (handle,) = step.handles
        optimizer = server.holding.optimizer
        if not optimizer.takes_several or len(optimizer.values) < WORTH_IT or handle in server.kept:
            return False
        segment = server.segments[handle.source, handle.incarnation]
        apart = segment.absent or segment.shows_servers or segment.gradient is not segment.pieces
        if apart or server.receiving is not None or server.journal is not None:
            return False
        if len(self.steps) == MOST:
            self.catch_up()
        self.steps.append((step, segment))
        return True

    def put_off_answer(self, answer: Answer) -> bool:
        """Whether this answer is given later, when the step it waits for is taken."""
        if not self.steps:
            return False
        last, _ = self.steps[-1]
        if answer.parameters.version != last.version or answer.parameters.worker != last.handles[0].source:
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
        weights = [step.weight for step, _ in steps]
        self.server.holding.optimizer.apply_each([segment.gradient for _, segment in steps], weights)
        for step, segment in steps:
            segment.holds = step.version
            self.server.note(step)
        for answer in answers:
            self.server.answer(answer)
