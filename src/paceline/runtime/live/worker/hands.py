"""The worker's side of dealing samples: the hands it holds, and what becomes of what it draws from them.

For each sampler a worker has a hand in play, from which the script draws, and one in reserve. When it takes up the
reserve it asks the driver's deck (`core/deck.py`) for the next one, so the answer is there long before it is needed
and nobody waits for a round trip, except for the very first hand. What was settled goes along with that request:
one message for a hand, not for a step.

How large a hand is. Large hands are few messages; small ones leave more to share with whoever joins, and less is
dealt again when this worker is killed. A sampler yields single samples and does not know the batch; what a step has
used is known after the first one, and until then it is taken to be few. A hand is an eighth of this worker's
share of the epoch, but not less than 4 steps' worth and not more than 32.

What a step has used. Nobody tells: the gradient does not say which samples are in it. So it is what was drawn since
the step before, which is exact for a loop that draws its batch, steps, and draws the next. A loader with processes
of its own draws ahead of the loop, but torch's knows how many batches it has handed over, and these are what was
used. If anything else draws ahead, the script must say how much a step uses (`per_step`), and each step settles so
much of what was drawn, oldest first: what was drawn ahead would otherwise be acknowledged by a step that has not seen
it, and lost if its own gradient is.

A step that counted on at least one shard acknowledges what it used; one that the policy dropped everywhere returns
it. A step that was skipped, or whose gradient was not finite, acknowledges too: the next try would be no better, and
a run in which a sample makes NaN, or that has diverged, would never end. What was drawn and not used is returned when
the script starts to draw anew, having left the loop early. What a loader drops because its last batch is not whole
counts as not drawn, and the next iteration begins with it: dealt again it would be last again, in a share of few
batches, and dropped for ever. Reports wait for the next request, or for the end: if the worker is killed before, what
they say is dealt again. At least once, never less.

A pass that is given up (`aborting.py`) runs again. What it has drawn itself, in the closure, it will not see a second
time unless it is put back; so it is, and the second run draws the same samples. From a loader that draws ahead the
second run gets the next batches: those of the first are returned with the step. (With `per_step` they are taken to be a
step's worth, if a closure was ever seen to draw.) A pass that has drawn the last of an iteration is not given up: its
second run would find nothing, and after the last epoch nobody would draw what it had.

An iteration of a sampler ends when the deck passes; the next one is then in the next epoch. A loop that is left
early goes on in the same epoch with what it had not drawn. An iteration is never empty, whatever others took: a loop
around the loader that waits for steps would otherwise spin.

All of this is in the thread that calls `step`, as everything that reads the links.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from paceline.core.deck import Deal, HandAcknowledged, HandRequested, HandReturned, Pass
from paceline.dealing import permutation
from paceline.errors import PacelineError
from paceline.runtime.live import wire

if TYPE_CHECKING:
    from paceline.runtime.live.peer.peer import LivePeer
    from paceline.runtime.live.worker.worker import LiveWorker

CURRENT = -1
"""Asks for the epoch that the others are in."""
FEW_STEPS, MANY_STEPS, PARTS = 4, 32, 8
"""A hand is one of so many parts of a worker's share, but from FEW_STEPS to MANY_STEPS steps' worth."""
FIRST_GUESS = 8
"""Samples of a step, before the first one."""
FRAMES = 16
"""How far up a loader is looked for."""


class Hand:
    """What was dealt in one answer. Of its samples so many are drawn, and of these so many settled, from the first."""

    __slots__ = ("drawn", "epoch", "samples", "settled", "ticket")

    def __init__(self, ticket: int, epoch: int, samples: list[int]) -> None:
        self.ticket = ticket
        self.epoch = epoch
        self.samples = samples
        self.drawn = 0
        self.settled = 0


class Holder:
    """The hands of one sampler."""

    def __init__(self, worker: LiveWorker | LivePeer, sampler: int, size: int, seed: int, per_step: int | None) -> None:
        self.worker = worker
        self.sampler = sampler
        self.size = size
        self.seed = seed
        self.per_step = per_step
        self.step_samples = per_step or FIRST_GUESS
        """How much a step uses: as told, or the most seen so far."""
        self.epoch = CURRENT
        self.ticket = 0
        self.waiting = False
        """A request is open."""
        self.reserve: Deal | Pass | None = None
        """The answer to the last one, until it is taken up."""
        self.hands: deque[Hand] = deque()
        """Those with something that is not settled, oldest first."""
        self.in_play: Hand
        """The one that was drawn from last."""
        self.reports: list[tuple[bool, int, int, int]] = []
        """Settled and not reported: (counted, ticket, start, stop)."""
        self.iteration = 0
        self.settled = 0
        """In this iteration."""
        self.used: Callable[[], int] | None = None
        """In this iteration, if the loader knows."""
        self.exhausted = False
        """This iteration yields nothing more."""
        self.yielded = 0
        """Ever."""
        self.marked = (0, 0, 0)
        """When the pass began that may be given up: the iteration, what was ever yielded, what the step had used."""
        self.draws_inside = False
        """Whether a pass was seen to draw."""
        self.spoiled = (0, 0)
        """So many of what this step has used, after the first so many, were used by a pass that was given up."""
        self.permutations: dict[int, NDArray[np.int64]] = {}

    def draw(self) -> Iterator[int]:
        """The samples of one iteration, until the deck passes."""
        self.worker.hands.check_caller()
        loader = look_at_loader()
        if self.per_step is None and loader.ahead is not None and loader.used() is None:
            raise PacelineError(
                "this DataLoader draws ahead of the loop, and its batches are not torch's: say how many samples a step "
                "uses, paceline.Sampler(data, per_step=...)"
            )
        self.iteration += 1
        iteration = self.iteration
        self.settle(counted=False)
        self.settled, self.used, self.spoiled = 0, loader.used(), (0, 0)
        self.exhausted = False
        before = self.yielded
        while (hand := self.next_hand(self.yielded > before)) is not None:
            self.in_play = hand
            # Meanwhile what was drawn may be put back, even into the hand before.
            while self.in_play is hand and hand.drawn < len(hand.samples):
                hand.drawn += 1
                self.yielded += 1
                yield hand.samples[hand.drawn - 1]
                if self.iteration != iteration:
                    raise PacelineError("two loops draw from one paceline.Sampler: make a sampler for each")
            self.worker.hands.check_caller()
        self.exhausted = True
        self.put_back((self.yielded - before) % loader.whole)

    def next_hand(self, drew: bool) -> Hand | None:
        """The hand to draw from; None if the iteration, which `drew` something already, is over."""
        for hand in self.hands:
            if hand.drawn < len(hand.samples):
                return hand
        while True:
            if not self.waiting and self.reserve is None:
                self.ask()
            while self.reserve is None:
                self.worker.await_driver()
            answer, self.reserve = self.reserve, None
            if isinstance(answer, Pass):
                self.epoch = answer.epoch + 1
            else:
                self.hands.append(Hand(answer.ticket, answer.epoch, self.samples(answer)))
            self.ask()
            if isinstance(answer, Deal):
                return self.hands[-1]
            if drew:
                return None

    def ask(self) -> None:
        """Ask for the next hand, and report what was settled."""
        self.ticket += 1
        self.waiting = True
        worker = self.worker
        request = HandRequested(
            worker.now(), worker.rank, worker.incarnation, self.ticket, self.epoch, self.hand_size()
        )
        self.tell(request)

    def hand_size(self) -> int:
        if self.per_step is None:
            self.step_samples = max(self.step_samples, sum(hand.drawn - hand.settled for hand in self.hands))
        share = self.size // self.worker.config.members.workers
        return min(max(share // PARTS, FEW_STEPS * self.step_samples), MANY_STEPS * self.step_samples)

    def tell(self, *requests: HandRequested) -> None:
        worker, now = self.worker, self.worker.now()
        settled = [
            (HandAcknowledged if counted else HandReturned)(now, worker.rank, worker.incarnation, ticket, start, stop)
            for counted, ticket, start, stop in self.reports
        ]
        self.reports.clear()
        events = (*settled, *requests)
        if events:
            play = wire.Play(worker.rank, worker.incarnation, self.sampler, self.size, self.seed, events)
            worker.driver.send(wire.encode(play))

    def take(self, dealt: wire.Dealt) -> None:
        if self.waiting and dealt.answer.ticket == self.ticket:
            self.waiting = False
            self.epoch = dealt.epoch
            self.reserve = dealt.answer

    def samples(self, deal: Deal) -> list[int]:
        """The samples at the dealt positions."""
        if deal.epoch not in self.permutations:
            while len(self.permutations) > 1:  # one before and this one: returned samples are of the epoch before
                del self.permutations[min(self.permutations)]
            self.permutations[deal.epoch] = permutation(self.size, self.seed, deal.epoch)
        order = self.permutations[deal.epoch]
        parts: list[list[int]] = [order[strip.start : strip.stop : strip.step].tolist() for strip in deal.strips]
        return parts[0] if len(parts) == 1 else [sample for part in parts for sample in part]

    def settle(self, counted: bool, most: int = sys.maxsize) -> int:
        """Settle what was drawn, or so much of it, oldest first; how much it was."""
        settled = 0
        for hand in self.hands:
            start = hand.settled
            hand.settled = stop = min(hand.drawn, start + most - settled)
            if stop == start:
                continue
            settled += stop - start
            self.note(counted, hand.ticket, start, stop)
        while self.hands and self.hands[0].settled == len(self.hands[0].samples):
            self.hands.popleft()
        self.settled += settled
        return settled

    def settle_step(self, counted: bool) -> None:
        """A step was taken: what it used is acknowledged or returned."""
        if self.spoiled[1]:
            first, spoiled = self.spoiled
            self.spoiled = (0, 0)
            self.settle(counted, first)
            self.settle(False, spoiled)
        if self.per_step is not None:
            self.settle(counted, self.per_step)
        elif self.used is not None:
            self.settle(counted, max(self.used() - self.settled, 0))
        else:
            self.step_samples = max(self.step_samples, self.settle(counted))

    def put_back(self, count: int) -> None:
        """The newest so many of what was drawn were not: they are drawn next, by the next iteration if need be."""
        for hand in reversed(self.hands):
            part = min(count, hand.drawn - hand.settled)
            hand.drawn -= part
            count -= part
            if part:
                self.in_play = hand

    def used_in_step(self) -> int:
        """How much was used since the step before, as far as is known."""
        if self.used is not None:
            return max(self.used() - self.settled, 0)
        return sum(hand.drawn - hand.settled for hand in self.hands)

    def lacks_a_second_time(self) -> bool:
        """Whether this pass has drawn what a second run of it could not: the iteration is at its end."""
        if not self.exhausted:
            return False
        iteration, yielded, before = self.marked
        left = sum(hand.drawn - hand.settled for hand in self.hands)
        if self.per_step is not None:
            return (self.draws_inside or self.yielded != yielded) and left < 2 * self.per_step
        used = self.used_in_step()
        drawn = used - (before if self.iteration == iteration else 0)
        return drawn > 0 and (self.used is None or left - used < drawn)

    def begin_pass(self) -> None:
        self.marked = (self.iteration, self.yielded, self.used_in_step())

    def end_pass(self, given_up: bool) -> None:
        """Of a pass that is given up, what it has drawn itself is not used."""
        iteration, yielded, before = self.marked
        self.draws_inside |= self.yielded != yielded
        if not given_up:
            return
        if self.iteration != iteration:
            before = 0  # a new iteration has returned what was there
        if self.per_step is not None:
            # Who draws ahead has nothing more to draw in the last passes of an iteration.
            self.spoiled = (0, self.per_step) if self.draws_inside else (0, 0)
        elif self.used is not None:
            self.spoiled = (before, max(self.used_in_step() - before, 0))
        else:
            self.put_back(max(self.used_in_step() - before, 0))

    def note(self, counted: bool, ticket: int, start: int, stop: int) -> None:
        """Report this part later, as one with the part before it if they met the same fate."""
        if self.reports:
            before = self.reports[-1]
            if before[0] == counted and before[1] == ticket and before[3] == start:
                start = before[2]
                self.reports.pop()
        self.reports.append((counted, ticket, start, stop))


class Hands:
    """The hands of all samplers of this worker."""

    def __init__(self, worker: LiveWorker | LivePeer) -> None:
        self.worker = worker
        self.holders: dict[int, Holder] = {}
        self.caller: tuple[int, int] | None = None
        """The process and thread that made the optimizer: it alone may draw."""

    def open(self) -> None:
        """This worker is a member now: it may ask."""
        self.caller = os.getpid(), threading.get_ident()

    def check_caller(self) -> None:
        if self.caller is None:
            raise PacelineError(
                "a paceline.Sampler was drawn from before paceline.Optimizer was made: this worker has no share yet"
            )
        if self.caller != (os.getpid(), threading.get_ident()):
            raise PacelineError(
                "a paceline.Sampler was drawn from outside the thread that made paceline.Optimizer: only that one may"
            )

    def holder(self, sampler: int, size: int, seed: int, per_step: int | None) -> Holder:
        if sampler not in self.holders:
            self.holders[sampler] = Holder(self.worker, sampler, size, seed, per_step)
        return self.holders[sampler]

    def take(self, dealt: wire.Dealt) -> None:
        self.holders[dealt.sampler].take(dealt)

    def settle(self, counted: bool) -> None:
        """A step was taken: what it used is acknowledged or returned."""
        for holder in self.holders.values():
            holder.settle_step(counted)

    def begin_pass(self) -> None:
        """A closure runs that may be given up."""
        for holder in self.holders.values():
            holder.begin_pass()

    def may_repeat(self) -> bool:
        """Whether what the pass has drawn can be drawn again, or other samples in its place."""
        return not any(holder.lacks_a_second_time() for holder in self.holders.values())

    def end_pass(self, given_up: bool) -> None:
        """It has ended, or is given up and will run again."""
        for holder in self.holders.values():
            holder.end_pass(given_up)

    def report(self) -> None:
        """Last words, before this worker leaves: what it has not settled is dealt to others then."""
        for holder in self.holders.values():
            holder.tell()


class Loader(NamedTuple):
    """What is known of the loader that draws. One that is not torch's own is not known."""

    whole: int = 1
    """The size of its batches, if it drops others."""
    batch: int | None = None
    ahead: _MultiProcessingDataLoaderIter | None = None
    """It has processes of its own, so it draws ahead of the loop; this knows how far the loop is."""

    def used(self) -> Callable[[], int] | None:
        """How many samples the loop has got so far, if the loader knows better than the sampler."""
        if self.ahead is None or self.batch is None or not hasattr(self.ahead, "_rcvd_idx"):
            return None
        batch, alive = self.batch, ref(self.ahead)

        def used() -> int:
            ahead = alive()
            # A loop that was left uses nothing more.
            return 0 if ahead is None else int(ahead._rcvd_idx) * batch

        return used


def look_at_loader() -> Loader:
    """The loader is found among the callers."""
    found = Loader()
    frame: FrameType | None = sys._getframe(1)
    for _ in range(FRAMES):
        if frame is None:
            break
        caller = frame.f_locals.get("self")
        if isinstance(caller, BatchSampler):
            found = found._replace(batch=caller.batch_size, whole=caller.batch_size if caller.drop_last else 1)
        elif isinstance(caller, _MultiProcessingDataLoaderIter):
            # Without batches it draws sample by sample.
            found = found._replace(ahead=caller, batch=found.batch or (None if caller._auto_collation else 1))
        frame = frame.f_back
    return found
