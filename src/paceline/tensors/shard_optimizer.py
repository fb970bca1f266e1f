"""One shard's slice of the parameters, and the steps taken on it.

A slice is stepped piece by piece, a piece being of one tensor: torch's own code on views of the slice, so BSP equals
single-process training to the last rounding. Plain SGD does the same to all: it goes through the slice in runs of
pieces that lie one after the other, each run in one pass over memory (`fused_kernels.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from paceline.tensors import fused_kernels
from paceline.tensors.fused_optimizers import FusedPieceOptimizer
from paceline.tensors.layout import Layout, Part, Piece
from paceline.tensors.optimizers import OptimizerSpec
from paceline.tensors.piece_optimizers import SCALARS, Hyper, MovingAverage, PieceOptimizer, State, is_plain

T = TypeVar("T")

PIECE = fused_kernels.PART
"""The largest number of elements of a piece."""

WORTH_A_THREAD = 1 << 18
"""A slice needs so many elements for each thread: waking one takes as long as it takes to step so many."""

MOST_THREADS = 8
"""More threads would wait for each other: Python lets one at a time begin with its next piece."""

THERE = "there"
"""The key, in a state, of whether a piece has any state yet."""
AVERAGE = "average"
"""The key, in a state, of the moving average of the parameters."""
SAMPLES = "samples"
"""The key, in a state, of how many samples a schedule has counted."""


LARGEST_NORM = 1e150
"""The largest norm of a piece that clipping takes: its square can be added up and written down."""


class ThreadCounts(NamedTuple):
    """How many threads step a slice at once."""

    mean: int
    """For a step on the mean of several gradients: their senders wait for it, so their cores are free."""
    single: int
    """For steps on one gradient after another: others compute meanwhile."""

    @classmethod
    def of(cls, servers: int, workers: int) -> ThreadCounts:
        """Returns the threads of each of so many servers, beside so many workers."""
        cores = len(os.sched_getaffinity(0))
        return cls(cores // servers, cores // (servers + workers))

    def for_elements(self, elements: int) -> ThreadCounts:
        """Returns no more threads than such a slice is worth."""
        most = min(MOST_THREADS, elements // WORTH_A_THREAD)
        return ThreadCounts(*(max(1, min(wanted, most)) for wanted in self))


ONE_THREAD = ThreadCounts(1, 1)


class PieceRun(NamedTuple):
    """Adjoining pieces of one group as one: the number of the first, and where it lies in the slice and the whole
    vector."""

    first: int
    offset: int
    start: int
    length: int


class Share(NamedTuple):
    """The part of a run that one thread steps."""

    run: int
    where: slice


class SlicedGradient(list[Tensor]):
    """The pieces of a vector, as views, and its runs."""

    def __init__(self, pieces: list[Tensor], runs: list[Tensor]) -> None:
        super().__init__(pieces)
        self.runs = runs


class ShardOptimizer:
    """One shard's slice of the parameters, and the optimizer that steps it.

    A gradient is handed in cut as the slice is (`cut`, `cut_from`), or, if it does not lie in one vector, as a list of
    the same pieces.
    """

    def __init__(
        self, layout: Layout, part: Part, values: Tensor, spec: OptimizerSpec, threads: ThreadCounts = ONE_THREAD
    ) -> None:
        self.values = values
        self.pieces = layout.pieces(part, PIECE)
        self.runs = runs_of(self.pieces)
        extras = spec.extras
        self.step_schedule = extras.step_schedule()
        self.clip_mean = extras.clip_mean
        self.cuts = self.cut(values)
        self.name = spec.name
        self.average = values.clone() if extras.ema is not None else None
        averages: Sequence[MovingAverage | None] = [None] * len(self.pieces)
        if self.average is not None and extras.ema is not None:
            averages = [MovingAverage(each, extras.ema, extras.stretch) for each in self.cut(self.average)]
        self.piece_optimizers: list[PieceOptimizer] = [
            spec.piece_optimizer(tensor, piece.group, self.step_schedule, average, layout.entries[piece.entry].shape)
            for piece, tensor, average in zip(self.pieces, self.cuts, averages, strict=True)
        ]
        longest = max((min(fused_kernels.PART, len(values)), *(piece.length for piece in self.pieces)))
        self.threads = threads.for_elements(len(values))
        most = max(self.threads)
        self.scratch = [torch.empty(longest, dtype=values.dtype) for _ in range(most)]
        self.whole = [Share(number, slice(0, run.length)) for number, run in enumerate(self.runs)]
        self.shares = [
            Share(number, slice(at, min(at + PIECE, run.length)))
            for number, run in enumerate(self.runs)
            for at in range(0, run.length, PIECE)
        ]
        self.fused = [each for each in self.piece_optimizers if isinstance(each, FusedPieceOptimizer)]
        self.is_plain = self._is_plain()
        """Whether it is plain SGD, and nothing else follows the values: a step goes by runs."""
        self.pool = ThreadPoolExecutor(most - 1) if most > 1 else None

    def close(self) -> None:
        """Ends the threads: this slice is stepped no more."""
        if self.pool is not None:
            self.pool.shutdown(wait=False)

    def cut(self, flat: Tensor) -> SlicedGradient:
        """Cuts a vector as long as the slice into its pieces."""
        return SlicedGradient(
            [flat[piece.offset : piece.offset + piece.length] for piece in self.pieces],
            [flat[run.offset : run.offset + run.length] for run in self.runs],
        )

    def cut_from(self, whole: Tensor) -> SlicedGradient:
        """Cuts the pieces of the slice out of a vector over all parameters."""
        return SlicedGradient(
            [whole[piece.start : piece.start + piece.length] for piece in self.pieces],
            [whole[run.start : run.start + run.length] for run in self.runs],
        )

    def set_hyper(self, groups: Sequence[Hyper]) -> None:
        """Takes over hyper-parameters that a scheduler has changed on the worker."""
        for piece, stepper in zip(self.pieces, self.piece_optimizers, strict=True):
            stepper.hyper.update(groups[piece.group])
        self.is_plain = self._is_plain()

    def _is_plain(self) -> bool:
        return self.average is None and all(is_plain(self.name, stepper.hyper) for stepper in self.piece_optimizers)

    @property
    def can_step_on_each(self) -> bool:
        """Whether `apply_each` can be used."""
        return self.is_plain or len(self.fused) == len(self.pieces)

    def apply(
        self,
        gradients: Sequence[Sequence[Tensor]],
        weight: float,
        absent: Sequence[frozenset[int]] = (),
        targets: Sequence[Sequence[Tensor]] = (),
        spoil: bool = False,
        norm: float | None = None,
        shares: Sequence[float] = (),
    ) -> None:
        """One step on the mean of `gradients` (each in pieces) at `weight` times the learning rate.

        `shares` are those of the gradients in the mean, if they differ.
        `absent` names, for each gradient, the tensors that have none. As in torch, a tensor without any
        gradient is left alone, momentum and weight decay included; one that only some workers miss counts
        as zero for those. The new values are also written to `targets` (each in pieces; the gradients themselves may
        be among them), each piece while it is still in the cache. With `spoil`, the first gradient may be written over:
        the sum of several then needs no memory of its own. With `clip_mean` the mean is scaled down if its `norm` is
        larger; without a `norm` that of this slice is taken.
        """
        count = len(gradients)
        clip = self.clip_factor(gradients, norm, shares)
        self.step_schedule.advance(count)
        threads = self.threads.mean if count > 1 else self.threads.single
        missing = frozenset[int]().union(*absent).intersection(*absent) if any(absent) else frozenset()
        lying = [each.runs for each in gradients if isinstance(each, SlicedGradient)]
        shown = [each.runs for each in targets if isinstance(each, SlicedGradient)]
        if self.is_plain and not missing and not shares and (len(lying), len(shown)) == (count, len(targets)):

            def step_share(share: Share, scratch: Tensor) -> None:
                run = share.run
                each, there = [runs[run] for runs in lying], [runs[run] for runs in shown]
                # Divided with the rate: one pass less over the gradient.
                rate = -self._rate(run) * weight * self.step_schedule.factor * clip / count
                fused_kernels.step(self.cuts.runs[run], each, there, rate, share.where, each[0] if spoil else scratch)

            self._share(self.shares if threads > 1 else self.whole, step_share, threads)
            return

        def step_piece(index: int, scratch: Tensor) -> None:
            stepper = self.piece_optimizers[index]
            there = [target[index] for target in targets]
            if self.pieces[index].entry not in missing:
                pieces = [gradient[index] for gradient in gradients]
                own = pieces[0] if spoil else scratch
                if shares:
                    pieces = [fused_kernels.weighted_sum_into(pieces, shares, own)]
                stepper.step(pieces, there, weight, clip, own)
                return
            for target in there:
                target.copy_(stepper.values)

        self._share(range(len(self.pieces)), step_piece, threads)

    def measure(self, gradients: Sequence[Sequence[Tensor]], shares: Sequence[float] = ()) -> float:
        """Returns the squared norm of the mean of `gradients` (each in pieces), which are only read."""
        squared = [0.0] * len(self.pieces)

        def measure_piece(index: int, scratch: Tensor) -> None:
            pieces = [gradient[index] for gradient in gradients]
            if shares:
                squared[index] = squared_norm(fused_kernels.weighted_sum_into(pieces, shares, scratch))
            else:
                squared[index] = squared_norm(fused_kernels.sum_into(pieces, scratch))

        self._share(range(len(self.pieces)), measure_piece, self.threads.mean)
        return sum(squared) if shares else sum(squared) / len(gradients) ** 2

    def clip_factor(
        self, gradients: Sequence[Sequence[Tensor]], norm: float | None, shares: Sequence[float] = ()
    ) -> float:
        """Returns what the mean of `gradients` is multiplied by, as in torch.nn.utils.clip_grad_norm_."""
        if self.clip_mean is None:
            return 1.0
        if norm is None:
            norm = math.sqrt(self.measure(gradients, shares))
        return min(1.0, self.clip_mean / (norm + 1e-6))

    def apply_each(self, gradients: Sequence[SlicedGradient], weights: Sequence[float], all_wait: bool = False) -> None:
        """Does what `apply` does on one gradient after the other, each its own target, but in one pass through memory.

        What comes out is the same to the last bit, but a run is stepped on all gradients before the next is. With
        `all_wait` nobody computes meanwhile.
        """
        factors = []
        for _ in gradients:
            self.step_schedule.advance(1)
            factors.append(self.step_schedule.factor)

        def step(share: Share, _: Tensor) -> None:
            run, rate = share.run, -self._rate(share.run)
            rates = [rate * weight * factor for weight, factor in zip(weights, factors, strict=True)]
            fused_kernels.step_on_each(self.cuts.runs[run], [each.runs[run] for each in gradients], rates, share.where)

        def step_piece(index: int, _: Tensor) -> None:
            self.fused[index].step_on_each([each[index] for each in gradients], weights, factors)

        threads = self.threads.mean if all_wait else self.threads.single
        if self.is_plain:
            self._share(self.shares if threads > 1 else self.whole, step, threads)
        else:
            self._share(range(len(self.pieces)), step_piece, threads)

    def _rate(self, run: int) -> float:
        rate = self.piece_optimizers[self.runs[run].first].hyper["lr"]
        assert isinstance(rate, float | int)
        return rate

    def _share(self, parts: Iterable[T], step: Callable[[T, Tensor], None], threads: int) -> None:
        """Steps all parts, with memory for one. Each thread takes the next, so one that is woken late has less to
        do."""
        left = iter(parts)

        def work(scratch: Tensor) -> None:
            for part in left:
                step(part, scratch)

        others = [self.pool.submit(work, self.scratch[thread]) for thread in range(1, threads)] if self.pool else []
        work(self.scratch[0])
        for other in others:
            other.result()

    def state(self) -> State:
        """Returns the optimizer's state for this slice: vectors as long as the slice, scalars by piece."""
        states = [stepper.state() for stepper in self.piece_optimizers]
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
        if self.step_schedule.schedule is not None:
            state[SAMPLES] = torch.tensor([float(self.step_schedule.samples)], dtype=torch.float64)
        return state

    def load_state(self, state: State) -> None:
        """Takes over what `state` has returned."""
        if self.average is not None and AVERAGE in state:
            self.average.copy_(state[AVERAGE])
        if SAMPLES in state:
            self.step_schedule.samples = int(state[SAMPLES])
        for index, (piece, stepper) in enumerate(zip(self.pieces, self.piece_optimizers, strict=True)):
            if state[THERE][index]:
                where = slice(piece.offset, piece.offset + piece.length)
                stepper.load_state(
                    {
                        name: value[where].clone() if name not in SCALARS else value[index].clone()
                        for name, value in state.items()
                        if name not in (THERE, AVERAGE, SAMPLES)
                    }
                )


def squared_norm(vector: Tensor) -> float:
    """Returns the squared norm of finite numbers, as a finite one: what overflows its own kind of float is added up in
    doubles."""
    norm = torch.linalg.vector_norm(vector).item()
    if not math.isfinite(norm):
        norm = torch.linalg.vector_norm(vector, dtype=torch.float64).item()
    return norm * norm if norm < LARGEST_NORM else LARGEST_NORM**2


def runs_of(pieces: Sequence[Piece]) -> list[PieceRun]:
    """Joins the pieces that lie one after the other and are of one group."""
    runs: list[PieceRun] = []
    for number, piece in enumerate(pieces):
        if runs and pieces[number - 1].group == piece.group:
            first, offset, start, length = runs[-1]
            if start + length == piece.start:
                runs[-1] = PieceRun(first, offset, start, length + piece.length)
                continue
        runs.append(PieceRun(number, piece.offset, piece.start, piece.length))
    return runs
