"""The worker, one behaviour at a time: when it starts, whom it asks, which answers it takes."""

from __future__ import annotations

import pytest

from paceline.core.events import ParametersArrived, ViewChanged
from paceline.core.machine import InvariantViolated
from paceline.core.messages import Parameters, Pull, View
from paceline.policies import ASP, BSP, Backup

from .drive import WorkerAlone, computed, sent, state_of


class TestWorker:
    def test_starts_when_a_view_names_it(self) -> None:
        worker = WorkerAlone(BSP(), servers=2, rank=1)
        assert worker.worker.handle(ViewChanged(0.0, View(1, ((0, 0),)))) == []
        actions = worker.worker.handle(ViewChanged(0.0, View(2, ((0, 0), (1, 3)))))
        assert sent(actions) == [(0, Pull(1, 3, 0)), (1, Pull(1, 3, 0))]

    def test_starts_once(self) -> None:
        worker = WorkerAlone(BSP())
        assert worker.start()
        assert worker.worker.handle(ViewChanged(0.0, View(2, ((0, 0), (1, 0))))) == []
        assert worker.worker.handle(ViewChanged(0.0, View(1, ((0, 0),)))) == []

    def test_does_not_start_on_a_view_that_was_overtaken(self) -> None:
        worker = WorkerAlone(BSP())
        worker.worker.handle(ViewChanged(0.0, View(5, ((1, 0),))))
        assert worker.worker.handle(ViewChanged(0.0, View(4, ((0, 0), (1, 0))))) == []

    def test_takes_the_largest_answer_and_asks_the_others_again(self) -> None:
        worker = WorkerAlone(BSP(), servers=3)
        worker.start()
        assert worker.answer(1, 5) == worker.answer(0, 3) == []
        assert sent(worker.answer(2, 4)) == [(0, Pull(0, 0, 5)), (2, Pull(0, 0, 5))]

    def test_asks_again_until_all_agree(self) -> None:
        """A shard that was behind may overtake: then the others are behind."""
        worker = WorkerAlone(Backup(extra=1), servers=2)
        worker.start()
        worker.answer(0, 5)
        assert sent(worker.answer(1, 3)) == [(1, Pull(0, 0, 5))]
        assert sent(worker.answer(1, 7)) == [(0, Pull(0, 0, 7))]
        assert computed(worker.answer(0, 7)) == [7]

    def test_an_answer_that_comes_twice_is_taken_once(self) -> None:
        worker = WorkerAlone(ASP(), servers=2)
        worker.start()
        worker.answer(0, 0, version=1)
        worker.answer(0, 0, version=2)
        assert worker.worker.versions[0] == 1

    def test_a_second_answer_to_an_earlier_pull_is_not_taken(self) -> None:
        """Shard 0 was asked for 0, and again for 5: it is the answer to that which counts."""
        worker = WorkerAlone(ASP(), servers=2)
        worker.start()
        worker.answer(0, 3, version=1)
        assert sent(worker.answer(1, 5)) == [(0, Pull(0, 0, 5))]
        before = state_of(worker.worker)
        assert worker.answer(0, 4, version=2) == []
        assert state_of(worker.worker) == before
        assert computed(worker.answer(0, 5, version=3)) == [5]
        assert worker.worker.versions[0] == 3

    def test_an_answer_to_another_life_is_not_taken(self) -> None:
        worker = WorkerAlone(ASP(), servers=1)
        worker.start()
        before = state_of(worker.worker)
        ghost = Parameters(0, 0, 1, 4, 4, False)
        assert worker.worker.handle(ParametersArrived(0.0, ghost)) == []
        assert state_of(worker.worker) == before

    def test_knows_on_which_shards_its_push_was_dropped(self) -> None:
        worker = WorkerAlone(Backup(extra=1), servers=2)
        worker.start()
        worker.answer_all(0)
        worker.finish(0)
        worker.answer(0, 1, dropped=True)
        worker.answer(1, 1)
        assert worker.worker.dropped == [True, False]

    def test_its_check_sees_answers_for_different_iterations(self) -> None:
        worker = WorkerAlone(BSP())
        worker.start()
        worker.answer_all(0)
        worker.worker.answered[1] = 4
        with pytest.raises(InvariantViolated, match=r"worker 0 computes 0 on answers for \[0, 4\]"):
            worker.worker.check()

    def test_its_check_sees_computing_while_waiting(self) -> None:
        worker = WorkerAlone(BSP())
        worker.start()
        worker.worker.computing = True
        with pytest.raises(InvariantViolated, match="worker 0 computes while it waits"):
            worker.worker.check()
