"""FluentPS (Yao et al. 2019), sentence by sentence: Algorithm 1, Table III, and what sections I to III say of it.

Each test quotes what it checks. Where paceline does otherwise than a sentence says, the test says so. Lazy
execution, PSSP and DSPS are policies of their own and have their tests beside them.
"""

from __future__ import annotations

import pytest

from paceline.core.actions import Answer, Apply, Park
from paceline.core.messages import Handle, Pull, Push
from paceline.core.policy import CentralPolicy
from paceline.core.pull_gate import coin
from paceline.policies import ASP, BSP, DSSP, PSSP, SSP, Backup

from .drive import (
    ShardAlone,
    WorkerAlone,
    answered,
    answers,
    applied,
    computed,
    dropped,
    parked,
    sent,
    sources,
)

ALL = [BSP(), ASP(), SSP(staleness=2), Backup(extra=1)]
GATED = [BSP(), SSP(staleness=0), Backup(extra=0)]
"""Those whose pull condition is progress < V when all workers must push."""


class TestAlgorithm1Worker:
    def test_line_1_all_begin_from_the_same_parameters(self) -> None:
        """III.B: "All worker begin from the same initial model parameters (w0)." """
        for policy in ALL:
            shard = ShardAlone(policy, workers=3, started=False)
            first = [shard.pull(worker, 0) for worker in range(3)]
            assert [[p.version for p in answers(actions)] for actions in first] == [[0], [0], [0]]

    def test_line_2_iterations_count_from_0(self) -> None:
        """Algorithm 1, worker, line 2: "for i from 0 to Max_Iter do"."""
        worker = WorkerAlone(BSP())
        worker.start()
        assert computed(worker.answer_all(0)) == [0]

    def test_line_3_computes_on_the_parameters_that_arrived(self) -> None:
        """Line 3: "g <- step(w)": the gradient names the version of each slice it was computed on."""
        worker = WorkerAlone(ASP(), servers=2)
        worker.start()
        worker.answer(0, 0, version=7)
        worker.answer(1, 0, version=9)
        handles = {shard: m.handle for shard, m in sent(worker.finish(0)) if isinstance(m, Push)}
        assert handles == {0: Handle(0, 0, 0, 7, 8), 1: Handle(0, 0, 0, 9, 8)}

    def test_line_4_sends_gradients_and_its_progress_to_the_servers(self) -> None:
        """III.B: "sends g_i^n as well as its progress (i) to servers". To all: "the worker needs to communicate
        with multiple servers"."""
        worker = WorkerAlone(BSP(), servers=3)
        worker.start()
        worker.answer_all(0)
        pushes = [(shard, m.handle.iteration) for shard, m in sent(worker.finish(0)) if isinstance(m, Push)]
        assert pushes == [(0, 0), (1, 0), (2, 0)]

    def test_line_5_waits_for_the_parameters_of_the_next_iteration(self) -> None:
        """III.B: "It then waits for the accomplishment of reading the parameters w_{i+1} from servers by telling
        what version of parameters that are needed for calculating gradients in the next iteration."

        The paper's sPull carries i, ours i + 1: the iteration the parameters are for."""
        worker = WorkerAlone(BSP(), servers=2)
        worker.start()
        worker.answer_all(0)
        actions = worker.finish(0)
        assert [(shard, m.iteration) for shard, m in sent(actions) if isinstance(m, Pull)] == [(0, 1), (1, 1)]
        assert computed(actions) == []
        assert computed(worker.answer(0, 1)) == []
        assert computed(worker.answer(1, 1)) == [1]

    def test_the_push_goes_before_the_pull(self) -> None:
        """Lines 4 and 5: a server hears of the gradient before it is asked."""
        worker = WorkerAlone(BSP(), servers=2)
        worker.start()
        worker.answer_all(0)
        to_server_1 = [message for shard, message in sent(worker.finish(0)) if shard == 1]
        assert [type(message) for message in to_server_1] == [Push, Pull]


class TestAlgorithm1Server:
    def test_line_1_progress_begins_at_0(self) -> None:
        """Server, line 1: "V_train <- 0"."""
        for policy in ALL:
            assert ShardAlone(policy, workers=2).V == 0

    def test_lines_3_to_5_a_pull_whose_condition_holds_is_answered_at_once(self) -> None:
        """Lines 3-5: "if PULL_con is satisfied for V_train then *w <- w^m; server.response()": with the parameters
        as they are now, the worker's own push included."""
        shard = ShardAlone(SSP(staleness=1), workers=2)
        shard.push(0, 0)
        (answer,) = answers(shard.pull(0, 1))
        assert (answer.iteration, answer.version) == (1, 1)

    @pytest.mark.parametrize("policy", GATED, ids=str)
    def test_lines_6_to_11_otherwise_it_is_delayed(self, policy: CentralPolicy) -> None:
        """III.B: "If the pull condition (PULL_con) returns false, there are not enough workers updating their
        gradients to the server and the parameters are stale. The server appends this pull request into the lazy
        pull buffer". A delayed pull request is a `Park`, with a reason and whom it waits for."""
        shard = ShardAlone(policy, workers=3)
        (park,) = parked(shard.iterate(0, 0))
        assert (park.pull, park.waits_for, park.waits_for_count) == (Pull(0, 0, 1), (1, 2), 2)
        assert park.reason

    def test_line_7_the_buffer_is_indexed_by_what_frees_the_pull(self) -> None:
        """III.C: "lazy execution uses progress as the index of the lazy pull buffer that records these DPRs, while
        the soft barrier uses V_train." Here it is the soft barrier unless `lazy` is set: the bucket
        is the V that makes i < V + s true, i - s + 1. For BSP both are the same."""
        assert SSP(staleness=3).freed_at(i=5, V=1) == 3
        assert BSP().freed_at(i=5, V=5) == 6

    @pytest.mark.parametrize("policy", [ASP(), SSP(staleness=2)], ids=str)
    def test_line_15_a_push_is_applied_on_arrival_divided_by_n(self, policy: CentralPolicy) -> None:
        """Line 15: "w <- w + g/N"."""
        shard = ShardAlone(policy, workers=4)
        assert shard.push(2, 0) == [Apply((Handle(2, 0, 0, 0, 8),), 1 / 4, 1)]

    @pytest.mark.parametrize("policy", GATED[::2], ids=str)
    def test_line_15_under_bsp_n_pushes_make_one_step_on_their_mean(self, policy: CentralPolicy) -> None:
        """Line 15 applies g/N push by push under every model. Here, under BSP and Backup it is one step
        on the mean, which for SGD is the same sum, and for momentum the right one."""
        shard = ShardAlone(policy, workers=3)
        assert applied(shard.push(0, 0)) == applied(shard.push(2, 0)) == []
        (step,) = applied(shard.push(1, 0))
        assert (sources(step), step.weight, step.version) == ([(0, 0), (1, 0), (2, 0)], 1.0, 1)

    def test_line_16_counts_the_workers_that_pushed_an_iteration(self) -> None:
        """Line 16: "Count[progress] <- Count[progress] + 1". III.B: "the number of workers that have pushed
        gradients in a specified iteration" is open to a condition, and so is the progress of each."""
        shard = ShardAlone(SSP(staleness=3), workers=3)
        shard.iterate(0, 0)
        shard.iterate(0, 1)
        shard.iterate(1, 0)
        progress = shard.shard.progress
        assert progress.passed == {0: 2, 1: 1}
        assert (max(progress.next.values()), min(progress.next.values())) == (2, 0)

    def test_line_16_the_count_is_of_live_members(self) -> None:
        """Here that line reads otherwise: with 4 workers, three pushes and one of those three dead, the count
        equals the members although a live one has not pushed. So the dead leave the count."""
        shard = ShardAlone(BSP(), workers=4)
        for worker in (0, 1, 2):
            shard.push(worker, 0)
        assert shard.view(0, 1, 3) == []
        assert shard.V == 0
        (step,) = applied(shard.push(3, 0))
        assert sources(step) == [(0, 0), (1, 0), (2, 0), (3, 0)]

    @pytest.mark.parametrize("policy", GATED, ids=str)
    def test_lines_17_to_22_a_finished_iteration_releases_the_delayed_pulls(self, policy: CentralPolicy) -> None:
        """III.B: "If it returns true, the server has aggregated enough gradients to increase V_train and executes
        all delayed pull requests recorded in the lazy pull buffer." After applying the push that did it."""
        shard = ShardAlone(policy, workers=3)
        shard.iterate(1, 0)
        shard.iterate(0, 0)
        actions = shard.push(2, 0)
        kinds = [type(action) for action in actions]
        assert kinds == [Apply, Answer, Answer]
        assert answered(actions) == [(1, 1), (0, 1)]
        assert {p.version for p in answers(actions)} == {shard.shard.version}
        assert shard.V == 1

    def test_line_21_the_buffer_is_cleared(self) -> None:
        """Line 21: "callbacks[V_train].clear()": nobody is answered twice."""
        shard = ShardAlone(BSP(), workers=2)
        shard.iterate(0, 0)
        assert answered(shard.iterate(1, 0)) == [(0, 1), (1, 1)]
        assert shard.shard.parked == {}
        shard.push(0, 1)
        assert answered(shard.push(1, 1)) == []

    def test_lines_17_to_22_the_released_go_before_the_one_that_released_them(self) -> None:
        """The pushing worker's own pull comes after line 20 has answered the delayed ones."""
        shard = ShardAlone(BSP(), workers=2)
        shard.iterate(0, 0)
        assert answered(shard.iterate(1, 0)) == [(0, 1), (1, 1)]

    def test_line_24_a_push_has_no_answer_of_its_own(self) -> None:
        """Line 24: "server.response()" to the push. Ours has none: the answer to the pull that follows says
        whether the push counted."""
        shard = ShardAlone(Backup(extra=1), workers=2)
        shard.push(0, 0)
        assert answers(shard.push(1, 0)) == []
        (answer,) = answers(shard.pull(1, 1))
        assert answer.dropped


class TestTableIII:
    @pytest.mark.parametrize("V", range(4))
    @pytest.mark.parametrize("progress", range(-1, 6))
    def test_pull_conditions(self, progress: int, V: int) -> None:
        """BSP and drop stragglers: progress < V_train. ASP: progress < V_train + infinity. SSP: progress < V_train
        + s. (-1 is the pull before the first push: always true.)"""
        assert BSP().may_pull(progress, V) == (progress < V)
        assert Backup(extra=1).may_pull(progress, V) == (progress < V)
        assert ASP().may_pull(progress, V)
        for s in range(4):
            assert SSP(staleness=s).may_pull(progress, V) == (progress < V + s)

    @pytest.mark.parametrize("policy", [BSP(), ASP(), SSP(staleness=3)], ids=str)
    def test_push_condition_all_n(self, policy: CentralPolicy) -> None:
        """BSP, ASP, SSP: Count[V_train] == N, N being those alive."""
        assert [policy.finishes(passed, 4, 4) for passed in range(5)] == [False] * 4 + [True]
        assert [policy.finishes(passed, 3, 4) for passed in range(4)] == [False] * 3 + [True]

    def test_push_condition_drop_stragglers(self) -> None:
        """Drop stragglers: Count[V_train] == N_t, with N_t = N - b as configured, or all who are alive if fewer."""
        policy = Backup(extra=2)
        assert [policy.finishes(passed, 5, 5) for passed in range(6)] == [False] * 3 + [True] * 3
        assert [policy.finishes(passed, 2, 5) for passed in range(3)] == [False, False, True]

    def test_bsp_gives_nobody_the_next_iteration_before_all_have_pushed(self) -> None:
        shard = ShardAlone(BSP(), workers=3)
        assert parked(shard.iterate(0, 0))
        assert parked(shard.iterate(1, 0))
        assert answered(shard.iterate(2, 0)) == [(0, 1), (1, 1), (2, 1)]

    def test_asp_gives_everybody_everything(self) -> None:
        """I: "Asynchronous Parallel (ASP) removed all barriers among workers"."""
        shard = ShardAlone(ASP(), workers=3)
        for iteration in range(20):
            assert answered(shard.iterate(0, iteration)) == [(0, iteration + 1)]

    @pytest.mark.parametrize("s", range(5))
    def test_ssp_lets_the_fastest_be_s_ahead(self, s: int) -> None:
        """I: "the fastest worker could not exceed the slowest one more than a predefined staleness threshold s":
        with worker 1 in iteration 0, worker 0 may be in iteration s, not in s + 1."""
        shard = ShardAlone(SSP(staleness=s), workers=2)
        for iteration in range(s):
            assert answered(shard.iterate(0, iteration)) == [(0, iteration + 1)]
        (park,) = parked(shard.iterate(0, s))
        assert park.reason == f"{s + 1} ahead of worker 1, bound {s}"
        assert answered(shard.push(1, 0)) == [(0, s + 1)]

    def test_drop_stragglers_goes_on_with_any_n_t(self) -> None:
        """III.B: "all workers can enter the next iteration after the parameter servers receive gradients from any
        N_t workers"."""
        for last in range(3):
            shard = ShardAlone(Backup(extra=1), workers=3)
            first, second = (worker for worker in range(3) if worker != last)
            shard.iterate(first, 0)
            assert answered(shard.iterate(second, 0)) == [(first, 1), (second, 1)]
            actions = shard.iterate(last, 0)
            assert dropped(actions)
            assert answered(actions) == [(last, 1)]


N, AHEAD = 3, 4
"""Of the cells below: so many workers, and so far ahead the fastest goes."""

CELLS: list[tuple[CentralPolicy, list[bool], list[bool]]] = [
    (BSP(), [True, False, False, False, False], [False, False, True]),
    (ASP(), [True, True, True, True, True], [False, False, True]),
    (SSP(staleness=2), [True, True, True, False, False], [False, False, True]),
    (DSSP(low=1, high=3), [True, True, False, False, False], [False, False, True]),
    (Backup(extra=1), [True, False, False, False, False], [False, True, True]),
    (PSSP(staleness=2, c=1.0), [True, True, True, False, False], [False, False, True]),
    (PSSP(staleness=2, c=0.0), [True, True, True, True, True], [False, False, True]),
    (PSSP(staleness=2, c=0.5), [True, True, True, coin(0, 0, 2) >= 0.5, coin(0, 0, 3) >= 0.5], [False, False, True]),
]


@pytest.mark.parametrize(("policy", "may_pull", "finishes"), CELLS, ids=lambda value: str(value))
class TestTableIIIFromEvents:
    """Every row of the table, both columns, by what a shard does. DSPS, "progress < V_train + s" with an s that
    changes at runtime, is DSSP here: before it has seen two intervals, s is `low`."""

    def test_pull_condition(self, policy: CentralPolicy, may_pull: list[bool], finishes: list[bool]) -> None:
        """Nobody else has pushed anything: V_train = 0. Whoever has pushed iteration -1, 0, 1, 2, 3: may it read?"""
        for progress in range(-1, AHEAD):
            shard = ShardAlone(policy, workers=N, started=False)
            if progress >= 0:
                shard.push(0, progress)
            actions = shard.pull(0, progress + 1)
            assert shard.V == 0
            assert answered(actions) == [(0, progress + 1)] * may_pull[progress + 1]
            assert len(parked(actions)) == 1 - may_pull[progress + 1]

    def test_push_condition(self, policy: CentralPolicy, may_pull: list[bool], finishes: list[bool]) -> None:
        """Count[V_train] after each push of iteration 0: does V_train rise?"""
        shard = ShardAlone(policy, workers=N)
        risen = []
        for worker in range(N):
            shard.push(worker, 0)
            risen.append(shard.V == 1)
        assert risen == finishes

    def test_pull_condition_moves_with_v_train(
        self, policy: CentralPolicy, may_pull: list[bool], finishes: list[bool]
    ) -> None:
        """The same cells with V_train = 2: it is the difference that counts."""
        if policy == PSSP(staleness=2, c=0.5):
            may_pull = [*may_pull[:3], coin(0, 0, 4) >= 0.5, coin(0, 0, 5) >= 0.5]
        for progress in range(2, 2 + AHEAD):
            shard = ShardAlone(policy, workers=N)
            for iteration in range(2):
                for worker in range(N):
                    shard.iterate(worker, iteration)
            assert shard.V == 2
            shard.push(0, progress)
            assert len(parked(shard.pull(0, progress + 1))) == 1 - may_pull[progress - 1]


class TestSoftBarrier:
    def test_it_ends_when_all_are_within_the_range(self) -> None:
        """II.B: "the soft barrier finishes once all workers are within a specified range s of the current iteration
        and it may return stale parameters to fast workers." Worker 1 comes to within s, worker 2 does not yet."""
        shard = ShardAlone(SSP(staleness=2), workers=3)
        for iteration in range(3):
            shard.iterate(0, iteration)
        assert shard.shard.parked == {1: [Pull(0, 0, 3)]}
        assert answered(shard.push(1, 0)) == []
        assert answered(shard.push(2, 0)) == [(0, 3)]

    def test_figure_3a_settled_by_table_iii(self) -> None:
        """III.C, s = 3: "Before the slowest worker W2 pushes g_1, the fast worker W0 cannot pull w_4 ... after one
        iteration delay and g_1 is updated to servers, the barrier finishes and W0 reads w_4 without g_2 and g_3".

        The figure is off by one against Table III (3 < V + 3 holds from V = 1 on). Table III holds: W0 waits for
        g_0 of W2, and reads w_4 without g_1, g_2 and g_3."""
        shard = ShardAlone(SSP(staleness=3), workers=2)
        for iteration in range(4):
            actions = shard.iterate(0, iteration)
        assert parked(actions)[0].pull == Pull(0, 0, 4)
        assert answered(shard.push(1, 0)) == [(0, 4)]

    def test_it_appears_again_at_once(self) -> None:
        """II.B: "since the slowest worker is still following ... behind the fast workers, it might repeatedly
        satisfy the SSP condition and the soft barrier will appear frequently": one iteration later it is there."""
        shard = ShardAlone(SSP(staleness=1), workers=2)
        shard.iterate(0, 0)
        for iteration in range(1, 6):
            assert parked(shard.iterate(0, iteration))
            assert answered(shard.iterate(1, iteration - 1)) == [(0, iteration + 1), (1, iteration)]

    def test_the_order_of_release_is_that_of_arrival(self) -> None:
        shard = ShardAlone(SSP(staleness=0), workers=4)
        for worker in (2, 0, 3):
            shard.iterate(worker, 0)
        assert answered(shard.push(1, 0)) == [(2, 1), (0, 1), (3, 1)]


class TestServersDecideAlone:
    def test_overlap_one_server_answers_before_the_others_can(self) -> None:
        """III.D: "once the slowest worker pushes its gradients to one server node, this server can immediately send
        its updated parameter shard to the fast workers, instead of waiting for the slowest worker to update other
        M-1 parameter shards." (`scripts/overlap.txt` plays it with workers.)"""
        first, second = (ShardAlone(BSP(), workers=2, rank=rank) for rank in range(2))
        for shard in (first, second):
            shard.iterate(0, 0)
        assert answered(first.push(1, 0)) == [(0, 1)]
        assert second.V == 0

    def test_a_worker_starts_when_the_last_server_has_answered(self) -> None:
        """III.D and Figure 5(b): push and pull of different servers overlap, the iteration needs them all."""
        worker = WorkerAlone(BSP(), servers=3)
        worker.start()
        assert computed(worker.answer(2, 0)) == computed(worker.answer(0, 0)) == []
        assert computed(worker.answer(1, 0)) == [0]

    def test_each_server_may_have_its_own_model(self) -> None:
        """III.A: "each parameter server can choose the adaptive synchronization model to update its parameter shard.
        For instance, server node 1 uses SSP model ... and server node M uses drop stragglers model"."""
        loose, strict = ShardAlone(SSP(staleness=1), workers=3), ShardAlone(Backup(extra=1), workers=3, rank=1)
        worker = WorkerAlone(SSP(staleness=1), servers=2)
        worker.start()
        worker.answer_all(0)
        worker.finish(0)
        (early,) = answers(loose.iterate(0, 0))
        assert computed(worker.answer(0, early.iteration)) == []
        assert parked(strict.iterate(0, 0))
        (late,) = answers(strict.push(1, 0))
        assert computed(worker.answer(1, late.iteration)) == [1]

    def test_no_scheduler_is_asked(self) -> None:
        """III.D: "the parameter synchronization models are independently controlled on different servers, instead
        of the single scheduler": a shard sends nothing to anybody but answers to workers."""
        shard = ShardAlone(SSP(staleness=1), workers=2)
        actions = shard.iterate(0, 0) + shard.iterate(0, 1) + shard.iterate(1, 0)
        assert {type(action) for action in actions} == {Apply, Answer, Park}
