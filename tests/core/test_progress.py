"""`Progress` keeps counts so that each event is cheap; here it is compared with the sums it stands for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.progress import NAMED, Progress, name_workers

Step = tuple[str, int, int]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("leave"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("push"), st.integers(0, 6), st.integers(0, 12)),
        st.tuples(st.just("promise"), st.integers(0, 6), st.integers(0, 12)),
        st.tuples(st.just("rise"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


class Naive:
    """The definition: next of every member, what each has pushed, and V. Everything else is a sum over members."""

    def __init__(self) -> None:
        self.next: dict[int, int] = {}
        self.pushed: dict[int, set[int]] = {}
        self.V = 0

    def take(self, step: Step) -> bool:
        """False if the step makes no sense now."""
        what, worker, iteration = step
        match what:
            case "join" if worker not in self.next:
                self.next[worker] = self.V
                self.pushed[worker] = set()
            case "leave" if worker in self.next:
                del self.next[worker], self.pushed[worker]
            case "push" if iteration >= self.next.get(worker, iteration + 1):
                self.next[worker] = iteration + 1
                self.pushed[worker].add(iteration)
            case "promise" if worker in self.next:
                self.next[worker] = max(self.next[worker], iteration)
            case "rise" if self.next:
                self.V += 1
            case _:
                return False
        return True

    def passed(self, iteration: int) -> int:
        return sum(at > iteration for at in self.next.values())

    def skipped(self, iteration: int) -> set[int]:
        return {worker for worker, at in self.next.items() if at > iteration and iteration not in self.pushed[worker]}


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(steps)
def test_progress_is_what_a_sum_over_the_members_says(steps: list[Step]) -> None:
    """Rises come at any time, not only when all have passed: that is Backup, with members below V."""
    naive, progress = Naive(), Progress()
    for step in steps:
        if not naive.take(step):
            continue
        what, worker, iteration = step
        match what:
            case "join":
                progress.join(worker)
            case "leave":
                progress.leave(worker)
            case "push":
                progress.push(worker, iteration)
            case "promise":
                progress.promise(worker, iteration)
            case "rise":
                progress.rise()
        compare(progress, naive)


def compare(progress: Progress, naive: Naive) -> None:
    assert (progress.V, progress.next) == (naive.V, naive.next)
    assert progress.passed_V() == naive.passed(naive.V)
    for iteration in range(naive.V, 14):
        assert progress.passed.get(iteration, 0) == naive.passed(iteration)
        assert progress.skipped.get(iteration, set()) == naive.skipped(iteration)
    kept = progress.passed.keys() | progress.skipped.keys()
    assert all(iteration >= naive.V for iteration in kept), "nothing is kept of what is over"
    standing = {worker: at for at, workers in progress.standing.items() for worker in workers}
    assert standing == naive.next
    assert all(progress.standing.values()), "no empty entry is kept"
    names, count = progress.missing()
    missing = {worker for worker, at in naive.next.items() if at <= naive.V}
    assert count == len(missing)
    assert set(names) <= missing
    assert list(names) == sorted(names)
    assert bool(names) == bool(missing)
    assert len(names) <= NAMED


def test_a_promise_never_goes_back() -> None:
    progress = Progress()
    progress.join(0)
    progress.promise(0, 5)
    progress.promise(0, 3)
    assert progress.next == {0: 5}
    assert progress.passed == dict.fromkeys(range(5), 1)
    assert progress.skipped == {iteration: {0} for iteration in range(5)}


def test_a_push_skips_what_was_not_pushed_before_it() -> None:
    progress = Progress()
    progress.join(0)
    progress.push(0, 0)
    progress.push(0, 3)
    assert progress.next == {0: 4}
    assert progress.passed == dict.fromkeys(range(4), 1)
    assert progress.skipped == {1: {0}, 2: {0}}


def test_a_promise_of_what_is_next_skips_nothing() -> None:
    """The usual pull: iteration i pushed, iteration i + 1 asked for."""
    progress = Progress()
    progress.join(0)
    progress.push(0, 0)
    progress.promise(0, 1)
    assert progress.next == {0: 1}
    assert progress.skipped == {}


def test_a_worker_that_leaves_takes_along_what_it_passed_and_skipped() -> None:
    progress = Progress()
    for worker in range(2):
        progress.join(worker)
        progress.push(worker, 2)
    progress.leave(0)
    assert [progress.passed[iteration] for iteration in range(3)] == [1, 1, 1]
    assert [progress.skipped[iteration] for iteration in range(2)] == [{1}, {1}]


def test_whoever_joins_stands_at_v() -> None:
    progress = Progress()
    progress.join(0)
    progress.promise(0, 3)
    progress.rise()
    progress.rise()
    progress.join(1)
    assert progress.next == {0: 3, 1: 2}
    assert progress.skipped == {2: {0}}


@pytest.mark.parametrize(
    ("names", "count", "words"),
    [
        ((3,), 1, "worker 3"),
        ((1, 2), 2, "workers 1, 2"),
        ((1, 2, 5, 6), 7, "workers 1, 2, 5, 6 and 3 others"),
        ((0,), 4, "worker 0 and 3 others"),
        ((0, 4), 3, "workers 0, 4 and 1 other"),
    ],
)
def test_workers_in_words(names: tuple[int, ...], count: int, words: str) -> None:
    assert name_workers(names, count) == words
