"""Revisiting Distributed Synchronous SGD (Chen et al. 2016), sentence by sentence: Algorithms 1 to 4, sections 2 and 3.

Async-Opt is `ASP`. Sync-Opt is `Backup`, whose `extra` is the paper's b; the paper's N, the gradients an
iteration needs, is our workers - extra. The moving average (Algorithm 2 line 4, Algorithm 4 line 9) belongs to
the tensors, not to the machines.
"""

from __future__ import annotations

import pytest

from paceline.core.actions import Apply, Park
from paceline.core.messages import Handle, Pull, Push
from paceline.core.trace import Trace, replay
from paceline.policies import ASP, BSP, Backup
from paceline.testing import play

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


def staleness(step: Apply) -> list[int]:
    """Section 2: "the number of updates that have occurred between its corresponding read and update"."""
    return [step.version - 1 - handle.version for handle in step.handles]


def ranks(trace: Trace) -> set[int]:
    return {record.node.rank for record in trace if record.node.role == "worker"}


class TestAsyncOpt:
    def test_algorithm_1_line_2_reads_from_every_server(self) -> None:
        """Line 2: "Read theta_k = (theta[0], ..., theta[M]) from PSs"."""
        worker = WorkerAlone(ASP(), servers=3)
        asked = [(shard, message) for shard, message in sent(worker.start())]
        assert asked == [(shard, Pull(0, 0, 0)) for shard in range(3)]

    def test_fetches_the_most_up_to_date_parameters(self) -> None:
        """Section 2: "The worker fetches from the parameter servers the most up-to-date parameters"."""
        shard = ShardAlone(ASP(), workers=2)
        for iteration in range(5):
            shard.iterate(1, iteration)
        shard.push(0, 0)
        (answer,) = answers(shard.pull(0, 1))
        assert answer.version == 6

    def test_algorithm_1_line_8_sends_to_every_server_and_reads_again(self) -> None:
        """Line 8: "Send G to parameter servers", line 1: "while True"."""
        worker = WorkerAlone(ASP(), servers=2)
        worker.start()
        assert computed(worker.answer_all(0)) == [0]
        messages = sent(worker.finish(0))
        assert [shard for shard, message in messages if isinstance(message, Push)] == [0, 1]
        assert [shard for shard, message in messages if isinstance(message, Pull)] == [0, 1]
        assert computed(worker.answer_all(1)) == [1]

    def test_algorithm_2_a_gradient_from_any_worker_is_applied(self) -> None:
        """Algorithm 2: "for t = 0, 1, ...: Wait for gradient G from any worker; theta(t+1) <- theta(t) - gamma G".

        Here it is applied with lr/N, so that a learning rate means the same under every policy."""
        shard = ShardAlone(ASP(), workers=3)
        for version, worker in enumerate((2, 0, 2, 1, 2), start=1):
            iteration = shard.shard.progress.next[worker]
            (step,) = applied(shard.iterate(worker, iteration))
            assert (sources(step), step.weight, step.version) == ([(worker, iteration)], 1 / 3, version)

    def test_each_worker_goes_on_independently_of_the_others(self) -> None:
        """Section 2: "each worker communicates with the parameter servers independently of the others"."""
        shard = ShardAlone(ASP(), workers=2)
        for iteration in range(10):
            assert answered(shard.iterate(0, iteration)) == [(0, iteration + 1)]
        assert parked(shard.iterate(1, 0)) == []

    def test_updates_while_a_worker_computes_make_its_gradient_stale(self) -> None:
        """Section 2: "model updates may have occurred while a worker is computing its stochastic gradient"; its
        staleness is "the number of updates that have occurred between its corresponding read and update"."""
        shard = ShardAlone(ASP(), workers=2)
        for iteration in range(3):
            (step,) = applied(shard.iterate(1, iteration))
            assert staleness(step) == [0]
        (step,) = applied(shard.push(0, 0))
        assert staleness(step) == [3]

    def test_n_equal_workers_see_staleness_n_minus_1(self) -> None:
        """What Table 1 measures, for workers that take turns: each update misses those of all the others."""
        shard = ShardAlone(ASP(), workers=5)
        for iteration in range(4):
            for worker in range(5):
                (step,) = applied(shard.iterate(worker, iteration))
                assert staleness(step) == [4 if iteration else worker]

    def test_a_read_may_be_of_no_single_version(self) -> None:
        """Section 2: "the read operation on a worker may be interleaved with updates by other workers to different
        parameter servers, so the resultant theta_k may not be consistent with any parameter incarnation"."""
        worker = WorkerAlone(ASP(), servers=2)
        worker.start()
        worker.answer(0, 0, version=4)
        assert computed(worker.answer(1, 0, version=6)) == [0]


class TestSyncOpt:
    def test_servers_wait_for_all_aggregate_and_answer_all(self) -> None:
        """Section 3: "the parameter servers wait for all workers to send their gradients, aggregate them, and send
        the updated parameters to all workers afterward"."""
        shard = ShardAlone(Backup(extra=0), workers=3)
        assert applied(shard.iterate(2, 0)) == applied(shard.iterate(0, 0)) == []
        actions = shard.iterate(1, 0)
        (step,) = applied(actions)
        assert sources(step) == [(0, 0), (1, 0), (2, 0)]
        assert answered(actions) == [(2, 1), (0, 1), (1, 1)]
        assert {p.version for p in answers(actions)} == {1}

    def test_it_is_true_minibatch_sgd(self) -> None:
        """Section 3: "This ensures that the actual algorithm is a true mini-batch stochastic gradient descent, with an
        effective batch size equal to the sum of all the mini-batch sizes": one step, on the mean of all gradients,
        each computed on the very version that the step changes."""
        shard = ShardAlone(Backup(extra=0), workers=4)
        for iteration in range(5):
            steps = [step for worker in range(4) for step in applied(shard.iterate(worker, iteration))]
            (step,) = steps
            assert (len(step.handles), step.weight, staleness(step)) == (4, 1.0, [0] * 4)

    def test_the_slowest_sets_the_pace(self) -> None:
        """Section 3: "the actual update time now depends on the slowest worker"."""
        shard = ShardAlone(Backup(extra=0), workers=3)
        shard.iterate(0, 0)
        (park,) = parked(shard.iterate(1, 0))
        assert park.waits_for == (2,)

    def test_without_backups_it_is_bsp(self) -> None:
        """Section 3.1 runs "Sync-Opt with ... b = 0 backups". Every step of a BSP run, faults and all, comes out the
        same under Backup(extra=0), but for the words in which a park is explained. (As long as nobody joins beyond
        the N configured, see `test_one_more_than_configured_is_one_more_backup`.)"""
        stories = [play(BSP(), workers=4, iterations=8, seed=seed) for seed in range(12)]
        traces = [story.trace for story in stories if 4 not in ranks(story.trace)]
        assert len(traces) >= 4
        sync = Backup(extra=0)
        for trace in traces:
            for step in replay(trace, lambda node, header: sync.machine(*node, header.members, header.seed)):
                for before, after in zip(step.record.actions, step.replayed, strict=True):
                    if isinstance(before, Park) and isinstance(after, Park):
                        assert (before.pull, before.waits_for) == (after.pull, after.waits_for)
                    else:
                        assert before == after


class TestBackupWorkers:
    def test_servers_stop_waiting_at_n_gradients(self) -> None:
        """Section 3: "instead of having only N workers, we add b extra workers, but as soon as the parameter servers
        receive gradients from any N workers, they stop waiting and update their parameters using the N gradients"."""
        shard = ShardAlone(Backup(extra=2), workers=5)
        assert applied(shard.push(4, 0)) == applied(shard.push(1, 0)) == []
        (step,) = applied(shard.push(3, 0))
        assert sources(step) == [(1, 0), (3, 0), (4, 0)]

    def test_96_of_100(self) -> None:
        """Section 3.1: "N = 96, b = 4 converges fastest"."""
        shard = ShardAlone(Backup(extra=4), workers=100)
        steps = [len(applied(shard.iterate(worker, 0))) for worker in range(100)]
        assert steps == [0] * 95 + [1] + [0] * 4

    def test_the_slowest_are_dropped_when_they_arrive(self) -> None:
        """Section 3: "The slowest b workers' gradients will be dropped when they arrive." """
        shard = ShardAlone(Backup(extra=2), workers=4)
        shard.push(0, 0)
        shard.push(1, 0)
        for late in (2, 3):
            (drop,) = shard.push(late, 0)
            assert dropped([drop])[0].handle == Handle(late, 0, 0, 0, 8)
            assert dropped([drop])[0].reason == "late: iteration 0, the shard is at 1"

    def test_algorithm_3_line_2_waits_to_read(self) -> None:
        """Algorithm 3, line 2: "Wait to read theta(t) = (theta(t)[0], ..., theta(t)[M]) from parameter servers":
        of iteration t from every one of them, unlike Async-Opt's read. A server that is behind is asked again."""
        worker = WorkerAlone(Backup(extra=1), servers=3)
        worker.start()
        worker.answer_all(0)
        worker.finish(0)
        assert worker.answer(0, 1) == worker.answer(1, 3) == []
        assert sent(worker.answer(2, 1)) == [(0, Pull(0, 0, 3)), (2, Pull(0, 0, 3))]
        assert computed(worker.answer(2, 3)) == []
        assert computed(worker.answer(0, 3)) == [3]

    def test_algorithm_3_line_8_sends_gradient_and_iteration(self) -> None:
        """Line 8: "Send (G, t) to parameter servers"."""
        worker = WorkerAlone(Backup(extra=1), servers=2)
        worker.start()
        worker.answer_all(7)
        pushes = [message.handle.iteration for _, message in sent(worker.finish(7)) if isinstance(message, Push)]
        assert pushes == [7, 7]

    def test_algorithm_3_line_1_settled_the_late_worker_adopts_the_servers_iteration(self) -> None:
        """Line 1: "for t = 0, 1, ..." would have a late worker go through every iteration, late each time.
        Here its pull is answered at once with V; otherwise it would stay late for ever."""
        shard = ShardAlone(Backup(extra=1), workers=3)
        for iteration in range(4):
            shard.iterate(0, iteration)
            shard.iterate(1, iteration)
        shard.push(2, 0)
        (answer,) = answers(shard.pull(2, 1))
        assert (answer.iteration, answer.version, answer.dropped) == (4, 4, True)
        shard.versions[2] = answer.version
        assert parked(shard.iterate(2, 4))
        (step,) = applied(shard.push(0, 4))
        assert sources(step) == [(0, 4), (2, 4)]

    def test_algorithm_4_line_5_only_gradients_of_the_iteration_count(self) -> None:
        """Lines 4-6: "Wait for (G, t') from any worker. if t' == t then add G else Drop gradient G". No t' is above t
        here: a worker starts t + 1 only when this server has answered it."""
        shard = ShardAlone(Backup(extra=1), workers=3)
        shard.iterate(0, 0)
        shard.iterate(1, 0)
        shard.push(0, 1)
        assert dropped(shard.push(2, 0))
        assert sources(applied(shard.push(1, 1))[0]) == [(0, 1), (1, 1)]

    def test_algorithm_4_line_8_one_step_on_the_mean_of_n(self) -> None:
        """Line 8: "theta(t+1) <- theta(t) - gamma/N sum G"."""
        shard = ShardAlone(Backup(extra=1), workers=3)
        shard.push(1, 0)
        (step,) = applied(shard.push(2, 0))
        assert (len(step.handles), step.weight, step.version) == (2, 1.0, 1)

    @pytest.mark.parametrize("extra", range(3))
    def test_no_gradient_is_stale(self, extra: int) -> None:
        """Section 1: "alleviating the straggler effect while avoiding any staleness in our gradients"; section 5:
        "softsync allows the use of stale gradients but we do not". In whole runs, on three servers, with faults."""
        for seed in range(10):
            for record in play(Backup(extra=extra), workers=4, iterations=8, seed=seed).trace:
                for step in applied(list(record.actions)):
                    assert staleness(step) == [0] * len(step.handles)

    def test_fewer_alive_than_n(self) -> None:
        """The paper has no failures. Here min(N - b as configured, alive) gradients finish an iteration."""
        shard = ShardAlone(Backup(extra=1), workers=4)
        shard.view(0, 3)
        shard.push(3, 0)
        (step,) = applied(shard.push(0, 0))
        assert sources(step) == [(0, 0), (3, 0)]

    def test_one_more_than_configured_is_one_more_backup(self) -> None:
        """The paper has no joins either. N - b is as configured, so whoever joins beyond N only adds to b: with
        b = 0 and a third worker beside the two configured, two gradients still finish an iteration."""
        shard = ShardAlone(Backup(extra=0), workers=2)
        shard.view(0, 1, 2)
        shard.push(2, 0)
        (step,) = applied(shard.push(0, 0))
        assert sources(step) == [(0, 0), (2, 0)]
        assert dropped(shard.push(1, 0))
