"""Pushes that have come together are stepped on together.

Under a policy that applies each gradient on arrival a server goes through all its parameters for each: it reads them,
steps, writes them, and writes them to the worker. If more pushes wait meanwhile, it goes through them once for all of
those, piece by piece: the parameters are read and written once. Machines and workers cannot tell: steps are in the same
order, and each worker gets the values after its own. But the first of them waits for the last, so they are few.

Only while messages of workers are taken, one after the other, is anything deferred: nothing is left when the server
obeys the driver, or a timer, or waits. Whatever else looks at the parameters meanwhile has deferred steps taken first.

Where there are fewer cores than processes, a server that has a push and could step takes a core from a worker that
computes. So it lets those who run go first, for as long as the last pass took at most, and finds more pushes waiting.
Whoever runs may be no worker, or one that is far from its next push: a server that has waited in vain does so less.
"""

from __future__ import annotations

import time

from paceline.core.actions import Answer, Apply
from paceline.runtime.live.messaging.unix_sockets import Link, Listener, Waiter
from paceline.runtime.live.server.worker_buffer import SegmentBuffer
from paceline.runtime.live.system.process_setup import others_run

MOST = 4
"""Steps taken together."""
WORTH_IT = 1 << 21
"""Parameters at least: with a million nothing was gained, they are in the cache anyway."""
PAUSE_S = 0.0005
"""Between two looks at whether others run."""
LONGEST_REST = 64
"""Passes without waiting, at most, after some in which it was in vain."""


class DeferredSteps:
    """Steps and answers that a machine has ordered and that are carried out a little later."""

    def __init__(self) -> None:
        self.taking = False
        """Messages of workers are being taken: only then is anything deferred."""
        self.steps: list[tuple[Apply, SegmentBuffer]] = []
        self.answers: list[Answer] = []
        """To those whose steps these are."""

    @property
    def is_full(self) -> bool:
        return len(self.steps) == MOST

    def waits_for_last(self, answer: Answer) -> bool:
        """Whether this is the answer to the worker whose gradient the last deferred step is taken on."""
        last, parameters = self.steps[-1][0], answer.parameters
        worker = (last.handles[0].source, last.handles[0].incarnation)
        return (parameters.worker, parameters.incarnation) == worker and parameters.version == last.version

    def take(self) -> tuple[list[tuple[Apply, SegmentBuffer]], list[Answer]]:
        """Everything that was deferred; nothing is from now on."""
        taken = self.steps, self.answers
        self.steps, self.answers = [], []
        return taken


class PushPacing:
    """How long a server waits for more pushes before it steps on those that are there."""

    def __init__(self) -> None:
        self.patience_s = 0.0
        """As long as the last pass took, if it could have been for more; 0: not at all."""
        self.rest = self.resting = 0
        """For how many passes not to wait after a wait in vain, and for how many still."""

    def let_others_run(self, most: int, listener: Listener, waiter: Waiter, driver: Link) -> None:
        """Wait for `most` pushes while anybody computes who may send one, but no longer than is worth it."""
        if self.resting:
            self.resting -= 1
            return
        until, inbox = time.monotonic() + self.patience_s, listener.inbox
        before, waited = len(inbox), False
        while len(inbox) < min(MOST, most) and time.monotonic() < until and others_run():
            waited = True
            if driver in waiter.wait(PAUSE_S):
                break
        if len(inbox) > before:
            self.rest = 0
        elif waited:
            self.rest = self.resting = min(LONGEST_REST, 2 * self.rest + 1)
