"""One shard's slice of the parameters, and the steps taken on it.

A slice is stepped piece by piece, a piece being of one tensor: torch's own code on views of the slice, so BSP equals
single-process training to the last rounding. Plain SGD does the same to all: it goes through the slice in runs of
pieces that lie one after the other, each run in one pass over memory (`passes.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from paceline.tensors import passes
from paceline.tensors.layout import Layout, Part, Piece
from paceline.tensors.optimizers import OptimizerSpec
from paceline.tensors.steppers import SCALARS, AveragingStepper, Hyper, SGDStepper, State, Stepper

T = TypeVar("T")

PIECE = passes.PART
"""Elements of a piece at most."""

WORTH_A_THREAD = 1 << 18
"""Elements of a slice for each thread at least: waking one takes as long as it takes to step so many."""

MOST_THREADS = 8
"""More would wait for each other: Python lets one at a time begin with its next piece."""

THERE = "there"
"""In a state: whether a piece has any yet."""
AVERAGE = "average"
"""In a state: the moving average of the parameters."""
SAMPLES = "samples"
"""In a state: how many samples a schedule has counted."""


class Threads(NamedTuple):
    """How many threads step a slice at once."""

    mean: int
    """On the mean of several gradients: those who sent them wait for it, so their cores are free."""
    single: int
    """On one gradient after another: others compute."""

    @classmethod
    def of(cls, servers: int, workers: int) -> Threads:
        """For each of so many servers, beside so many workers."""
        cores = len(os.sched_getaffinity(0))
        return cls(cores // servers, cores // (servers + workers))

    def for_elements(self, elements: int) -> Threads:
        """No more than such a slice is worth."""
        most = min(MOST_THREADS, elements // WORTH_A_THREAD)
        return Threads(*(max(1, min(wanted, most)) for wanted in self))


ONE_THREAD = Threads(1, 1)


class Run(NamedTuple):
    """Adjoining pieces of one group as one: the first's number, and where it lies in the slice and the whole vector."""

    first: int
    offset: int
    start: int
    length: int


class Share(NamedTuple):
    """A part of a run, for one thread."""

    run: int
    where: slice


class Cut(list[Tensor]):
    """The pieces of a vector, as views, and its runs."""

    def __init__(self, pieces: list[Tensor], runs: list[Tensor]) -> None:
        super().__init__(pieces)
        self.runs = runs


class SliceOptimizer:
    """One shard's slice of the parameters, and the optimizer that steps it.

    A gradient is handed in cut as the slice is (`cut`, `cut_from`), or, if it does not lie in one vector, as a list of
    the same pieces.
    """

    def __init__(
        self, layout: Layout, part: Part, values: Tensor, spec: OptimizerSpec, threads: Threads = ONE_THREAD
    ) -> None:
        self.values = values
        self.pieces = layout.pieces(part, PIECE)
        self.runs = runs_of(self.pieces)
        extras = spec.extras
        self.pace = extras.pace()
        self.cuts = self.cut(values)
        self.steppers: list[Stepper] = [
            spec.stepper(tensor, piece.group, self.pace, layout.entries[piece.entry].shape)
            for piece, tensor in zip(self.pieces, self.cuts, strict=True)
        ]
        self.average = values.clone() if extras.ema is not None else None
        if self.average is not None and extras.ema is not None:
            averages = self.cut(self.average)
            self.steppers = [
                AveragingStepper(stepper, average, extras.ema, extras.stretch)
                for stepper, average in zip(self.steppers, averages, strict=True)
            ]
        longest = max((min(passes.PART, len(values)), *(piece.length for piece in self.pieces)))
        self.threads = threads.for_elements(len(values))
        most = max(self.threads)
        self.scratch = [torch.empty(longest, dtype=values.dtype) for _ in range(most)]
        self.whole = [Share(number, slice(0, run.length)) for number, run in enumerate(self.runs)]
        self.shares = [
            Share(number, slice(at, min(at + PIECE, run.length)))
            for number, run in enumerate(self.runs)
            for at in range(0, run.length, PIECE)
        ]
        self.is_plain = self._is_plain()
        """Plain SGD, and nothing else follows the values: a step goes by runs, and `apply_each` can be used."""
        self.pool = ThreadPoolExecutor(most - 1) if most > 1 else None

    def close(self) -> None:
        """This slice is stepped no more: let the threads go."""
        if self.pool is not None:
            self.pool.shutdown(wait=False)

    def cut(self, flat: Tensor) -> Cut:
        """A vector as long as the slice."""
        return Cut(
            [flat[piece.offset : piece.offset + piece.length] for piece in self.pieces],
            [flat[run.offset : run.offset + run.length] for run in self.runs],
        )

    def cut_from(self, whole: Tensor) -> Cut:
        """The same of a vector over all parameters."""
        return Cut(
            [whole[piece.start : piece.start + piece.length] for piece in self.pieces],
            [whole[run.start : run.start + run.length] for run in self.runs],
        )

    def set_hyper(self, groups: Sequence[Hyper]) -> None:
        """Take over hyper-parameters a scheduler has changed on the worker."""
        for piece, stepper in zip(self.pieces, self.steppers, strict=True):
            stepper.hyper.update(groups[piece.group])
        self.is_plain = self._is_plain()

    def _is_plain(self) -> bool:
        return all(isinstance(stepper, SGDStepper) and stepper.is_plain() for stepper in self.steppers)

    def apply(
        self,
        gradients: Sequence[Sequence[Tensor]],
        weight: float,
        absent: Sequence[frozenset[int]] = (),
        targets: Sequence[Sequence[Tensor]] = (),
        spoil: bool = False,
    ) -> None:
        """One step on the mean of `gradients` (each in pieces) at `weight` times the learning rate.

        `absent` names, for each gradient, the tensors that have none. As in torch, a tensor without any
        gradient is left alone, momentum and weight decay included; one that only some workers miss counts
        as zero for those. The new values are also written to `targets` (each in pieces; the gradients themselves may
        be among them), each piece while it is still in the cache. With `spoil`, the first gradient may be written over:
        the sum of several then needs no memory of its own.
        """
        count = len(gradients)
        self.pace.advance(count)
        threads = self.threads.mean if count > 1 else self.threads.single
        missing = frozenset[int]().union(*absent).intersection(*absent) if any(absent) else frozenset()
        lying = [each.runs for each in gradients if isinstance(each, Cut)]
        shown = [each.runs for each in targets if isinstance(each, Cut)]
        if self.is_plain and not missing and (len(lying), len(shown)) == (count, len(targets)):

            def step_share(share: Share, scratch: Tensor) -> None:
                run = share.run
                each, there = [runs[run] for runs in lying], [runs[run] for runs in shown]
                # Divided with the rate: one pass less over the gradient.
                rate = -self._rate(run) * weight * self.pace.factor / count
                passes.step(self.cuts.runs[run], each, there, rate, share.where, each[0] if spoil else scratch)

            self._share(self.shares if threads > 1 else self.whole, step_share, threads)
            return

        def step_piece(index: int, scratch: Tensor) -> None:
            stepper = self.steppers[index]
            if self.pieces[index].entry not in missing:
                pieces = [gradient[index] for gradient in gradients]
                stepper.step(passes.add_up(pieces, pieces[0] if spoil else scratch), weight, count)
            for target in targets:
                target[index].copy_(stepper.values)

        self._share(range(len(self.pieces)), step_piece, threads)

    def apply_each(self, gradients: Sequence[Cut], weights: Sequence[float], all_wait: bool = False) -> None:
        """As `apply` on one gradient after the other, each its own target, but in one pass through memory.

        What comes out is the same to the last bit: only that a run is stepped on all gradients before the next is.
        With `all_wait` nobody computes meanwhile.
        """
        factors = []
        for _ in gradients:
            self.pace.advance(1)
            factors.append(self.pace.factor)

        def step(share: Share, _: Tensor) -> None:
            run, rate = share.run, -self._rate(share.run)
            rates = [rate * weight * factor for weight, factor in zip(weights, factors, strict=True)]
            passes.step_on_each(self.cuts.runs[run], [each.runs[run] for each in gradients], rates, share.where)

        threads = self.threads.mean if all_wait else self.threads.single
        self._share(self.shares if threads > 1 else self.whole, step, threads)

    def _rate(self, run: int) -> float:
        rate = self.steppers[self.runs[run].first].hyper["lr"]
        assert isinstance(rate, float | int)
        return rate

    def _share(self, parts: Iterable[T], step: Callable[[T, Tensor], None], threads: int) -> None:
        """Step all these, with memory for one. Each thread takes the next: one woken late has less to do, and all end
        together."""
        left = iter(parts)

        def work(scratch: Tensor) -> None:
            for part in left:
                step(part, scratch)

        others = [self.pool.submit(work, self.scratch[thread]) for thread in range(1, threads)] if self.pool else []
        work(self.scratch[0])
        for other in others:
            other.result()

    def state(self) -> State:
        """The optimizer's state for this slice, as plain tensors: vectors as long as the slice, scalars by piece."""
        states = [stepper.state() for stepper in self.steppers]
        state: State = {THERE: torch.tensor([float(bool(each)) for each in states])}
        for name in dict.fromkeys(name for each in states for name in each):
            scalar = next(each[name].dim() == 0 for each in states if name in each)
            if scalar:
                state[name] = torch.tensor([float(each[name]) if name in each else 0.0 for each in states])
            else:
                state[name] = torch.zeros_like(self.values)
                for piece, each in zip(self.cut(state[name]), states, strict=True):
                    if name in each:
                        piece.copy_(each[name])
        if self.average is not None:
            state[AVERAGE] = self.average
        if self.pace.schedule is not None:
            state[SAMPLES] = torch.tensor([float(self.pace.samples)], dtype=torch.float64)
        return state

    def load_state(self, state: State) -> None:
        """Take over what `state` gave."""
        if self.average is not None and AVERAGE in state:
            self.average.copy_(state[AVERAGE])
        if SAMPLES in state:
            self.pace.samples = int(state[SAMPLES])
        for index, (piece, stepper) in enumerate(zip(self.pieces, self.steppers, strict=True)):
            if state[THERE][index]:
                where = slice(piece.offset, piece.offset + piece.length)
                stepper.load_state(
                    {
                        name: value[where].clone() if name not in SCALARS else value[index].clone()
                        for name, value in state.items()
                        if name not in (THERE, AVERAGE, SAMPLES)
                    }
                )


def runs_of(pieces: Sequence[Piece]) -> list[Run]:
    """The pieces joined where they lie one after the other and are of one group."""
    runs: list[Run] = []
    for number, piece in enumerate(pieces):
        if runs and pieces[number - 1].group == piece.group:
            first, offset, start, length = runs[-1]
            if start + length == piece.start:
                runs[-1] = Run(first, offset, start, length + piece.length)
                continue
        runs.append(Run(number, piece.offset, piece.start, piece.length))
    return runs
