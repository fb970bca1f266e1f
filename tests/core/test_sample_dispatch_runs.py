"""The sample dispatcher under its judge, in random runs."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.sample_dispatch import (
    SampleDispatcher,
    cut,
    tidy,
)

from .dispatch_judge import (
    DispatchJudge,
    Step,
    flat,
    peaceful,
    random_run,
    run,
    steps,
)

any_range = st.builds(range, st.integers(0, 30), st.integers(0, 90), st.integers(1, 7))
repeatable = settings(max_examples=300, deadline=None, derandomize=True, database=None)


@repeatable
@given(st.lists(any_range, max_size=5), st.integers(0, 60), st.integers(0, 80), st.integers(1, 6))
def test_cut_is_a_slice_of_the_ranges_end_to_end(ranges: list[range], start: int, stop: int, step: int) -> None:
    assert flat(cut(ranges, start, stop, step)) == flat(ranges)[start:stop:step]


@repeatable
@given(st.integers(1, 60), st.lists(st.tuples(st.integers(0, 59), st.integers(1, 12), st.integers(1, 5))))
def test_tidy_keeps_the_positions(size: int, cuts: list[tuple[int, int, int]]) -> None:
    """On disjoint ranges, as they are in a dispatcher: pieces of pieces of one range."""
    ranges = [range(size)]
    for start, count, step in cuts:
        drawn = cut(ranges, start, start + count * step, step)
        kept = [range(p, p + 1) for p in flat(ranges) if p not in flat(drawn)]
        ranges = tidy(drawn + kept)
        assert sorted(flat(ranges)) == list(range(size))
        assert [each.start for each in ranges] == sorted(each.start for each in ranges)
    assert tidy([range(p, p + 1) for p in range(size)]) == [range(size)]


@repeatable
@given(st.integers(1, 40), st.integers(0, 2), st.integers(0, 4), steps)
def test_nothing_is_lost_and_nothing_consumed_is_granted_again(
    size: int, lead: int, workers: int, steps: list[Step]
) -> None:
    """And equal events give equal actions."""
    judge = run(DispatchJudge(size, lead), steps, workers)
    again = SampleDispatcher(size, lead)
    assert [again.handle(event) for event in judge.told] == judge.done


@repeatable
@given(st.integers(1, 60), st.integers(0, 2), st.integers(1, 4), peaceful)
def test_without_faults_everything_is_granted_exactly_once(
    size: int, lead: int, workers: int, steps: list[Step]
) -> None:
    judge = run(DispatchJudge(size, lead), steps, workers)
    assert set(judge.grants.values()) <= {1}
    assert len(judge.grants) == size * len(judge.where)


@repeatable
@given(st.integers(1, 60), st.integers(1, 4), peaceful)
def test_without_faults_and_within_the_lead_the_stripes_are_strides(size: int, workers: int, steps: list[Step]) -> None:
    judge = run(DispatchJudge(size, lead=1000), steps, workers)
    for epoch in judge.where:
        for rank in range(workers):
            leases = [lease for (worker, _, _), lease in judge.leases.items() if worker == rank and lease[0] == epoch]
            assert [p for _, positions in leases for p in positions] == list(range(rank, size, workers))


def test_the_runs_contain_what_they_should() -> None:
    """A harness that stopped making trouble would pass every test: count what happened."""
    seen: Counter[str] = Counter()
    for seed in range(100):
        judge = random_run(seed)
        seen += judge.seen
        seen["epochs closed"] += len(judge.closed)
    for what, least in {
        "copies": 2000,
        "answers repeated": 150,
        "early requests answered": 50,
        "positions of the lost": 1000,
        "positions granted again": 1000,
        "positions reported in vain": 500,
        "leases of an epoch before the lead": 50,
        "epochs closed": 150,
    }.items():
        assert seen[what] >= least, f"{what}: {seen[what]} times, expected at least {least}"
