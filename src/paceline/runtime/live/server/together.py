"""Pushes that have come together are stepped on together.

Under a policy that applies each gradient on arrival a server goes through all its parameters for each: it reads them,
steps, writes them, and writes them to the worker. If more pushes wait meanwhile, it goes through them once for all of
those, piece by piece: the parameters are read and written once. Machines and workers cannot tell: steps are in the same
order, and each worker gets the values after its own. But the first of them waits for the last, so they are few.

Only while messages of workers are taken, one after the other, is anything put off: nothing is left when the server
obeys the driver, or a timer, or waits. Whatever else looks at the parameters meanwhile has it caught up first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.actions import Answer, Apply
from paceline.runtime.live.server.mapped import Segment

if TYPE_CHECKING:
    from paceline.runtime.live.server.server import LiveServer

MOST = 4
"""Steps taken together."""
WORTH_IT = 1 << 21
"""Parameters at least: with a million nothing was gained, they are in the cache anyway."""


class Together:
    """What a server has been ordered to do and does a little later."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.steps: list[tuple[Apply, Segment]] = []
        self.answers: list[Answer] = []
        """To those whose steps these are."""
        self.taking = False
        """Messages of workers are being taken."""

    def take_messages(self) -> None:
        """Take what workers have said."""
        self.taking = True
        while (received := self.server.listener.receive()) is not None:
            self.server.take(*received)
        self.catch_up()
        self.taking = False

    def put_off(self, step: Apply) -> bool:
        """Whether this step is taken later, with others."""
        others = self.taking and (self.steps or self.server.listener.inbox)
        segment = self.segment_of(step) if others else None
        if segment is None:
            return False
        if len(self.steps) == MOST:
            self.catch_up()
        self.steps.append((step, segment))
        return True

    def segment_of(self, step: Apply) -> Segment | None:
        """Where its gradient is, and its values are to be; None if this step cannot be taken with others."""
        server, optimizer = self.server, self.server.holding.optimizer
        if not optimizer.takes_several or len(optimizer.values) < WORTH_IT:
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
        gradients, weights = [segment.gradient for _, segment in steps], [step.weight for step, _ in steps]
        self.server.holding.optimizer.apply_each(gradients, weights)
        for step, segment in steps:
            segment.holds = step.version
            self.server.note(step)
        for answer in answers:
            self.server.answer(answer)
