"""A trace: bytes and back, cut short, told as a story, and played again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import msgspec
import pytest

from paceline.core.actions import AbortCompute, Action, Answer, Drop, Measure, Reduce, Wait
from paceline.core.events import (
    ComputeAborted,
    Event,
    NormArrived,
    NotifyArrived,
    PeerEvent,
    PlanArrived,
    PullArrived,
    PushArrived,
    ReleaseArrived,
    Restored,
    ResyncArrived,
    RiseArrived,
    ServersChanged,
    SliceNormArrived,
    ViewChanged,
)
from paceline.core.formatting import to_text
from paceline.core.machine import Machine
from paceline.core.messages import Members, Node, View
from paceline.core.policy import CentralPolicy, PeerPolicy
from paceline.core.trace import Header, Record, Trace, encode_records, read_records, replay
from paceline.errors import PacelineError
from paceline.policies import ASP, BSP, SSP, Backup, Scheduled, Waiting, parse
from paceline.testing import play, play_peers


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A run with everything in it: kills, joins, drops, parks, rejections, timers."""
    return play(Waiting(delay_s=0.1, base="backup(extra=1)"), workers=4, iterations=8, seed=14).trace


def machines_of(policy: CentralPolicy, node: Node, header: Header) -> Machine:
    return policy.machine(node.role, node.rank, header.members, header.seed)


def answers(record: Record, worker: int) -> Iterator[bool]:
    return (isinstance(action, Answer) and action.parameters.worker == worker for action in record.actions)


class TestBytes:
    def test_there_and_back(self, trace: Trace) -> None:
        data = trace.to_bytes()
        back = Trace.from_bytes(data)
        assert back.header == trace.header
        assert back.records == trace.records
        assert back.to_bytes() == data

    def test_the_run_has_every_kind_of_event_and_action(self, trace: Trace) -> None:
        """So that the round trip above is one of every class."""
        of_schedulers = {RiseArrived, ReleaseArrived, NotifyArrived, ResyncArrived, PlanArrived, ComputeAborted}
        elsewhere = {Restored, ServersChanged, SliceNormArrived, NormArrived} | of_schedulers | set(get_args(PeerEvent))
        assert {type(record.event) for record in trace} == set(get_args(Event)) - elsewhere
        actions = {type(action) for record in trace for action in record.actions}
        assert actions == set(get_args(Action)) - {AbortCompute, Measure, Reduce, Wait}

    def test_runs_of_peers_go_there_and_back_too(self) -> None:
        events, actions = set(), set()
        for text in ("hop:graph=ring,notify_ack=true", "hop:graph=ring,max_gap=2", "adpsgd:graph=complete"):
            policy = parse(text)
            assert isinstance(policy, PeerPolicy)
            trace = play_peers(policy, peers=5, iterations=8, seed=3, faults=True).trace
            assert Trace.from_bytes(trace.to_bytes()).records == trace.records
            assert all(to_text(thing) for record in trace for thing in (record.event, *record.actions))
            assert any(record.node == ("peer", 1) for record in trace.story(1))
            events |= {type(record.event) for record in trace}
            actions |= {type(action) for record in trace for action in record.actions}
        assert events >= set(get_args(PeerEvent))
        assert actions >= {Reduce, Wait, Drop}

    def test_a_run_with_a_scheduler_goes_there_and_back_too(self) -> None:
        trace = play(Scheduled(base="bsp"), workers=3, iterations=6, seed=3, faults=False).trace
        assert {RiseArrived, ReleaseArrived} <= {type(record.event) for record in trace}
        assert Trace.from_bytes(trace.to_bytes()).records == trace.records
        releases = [record for record in trace.story(1) if record.node.role == "scheduler"]
        assert any(isinstance(record.event, RiseArrived) for record in releases), "released by a rise"
        assert all(to_text(record.event) for record in trace)

    def test_a_view_from_before_it_said_who_has_finished_can_be_read(self) -> None:
        line = b'["Record",["server",0],0,["ViewChanged",0.0,["View",2,[[0,0],[1,1]]]],[]]\n'
        (record,) = read_records(line)
        assert record.event == ViewChanged(0.0, View(2, ((0, 0), (1, 1)), ()))

    def test_one_json_value_a_line(self, trace: Trace) -> None:
        lines = trace.to_bytes().splitlines()
        assert len(lines) == 1 + len(trace)
        header = msgspec.json.decode(lines[0])
        assert header == [
            "Header",
            "testing",
            "waiting:delay_s=0.1,base=backup(extra=1)",
            [4, 3],
            14,
            [8, 8, 8],
            False,
            "",
        ]
        for line in lines[1:]:
            assert msgspec.json.decode(line)[0] == "Record"

    def test_records_written_one_by_one_are_the_same(self, trace: Trace) -> None:
        """A live node writes as it goes, and is killed as it goes."""
        data = b"".join(encode_records([record]) for record in trace)
        assert read_records(data) == trace.records
        assert trace.to_bytes().endswith(data)

    def test_a_header_alone_is_a_trace(self) -> None:
        empty = Trace(Header("virtual", "bsp", Members(1, 1), 0, (8,)))
        assert len(Trace.from_bytes(empty.to_bytes())) == 0

    def test_a_last_line_cut_short_is_left_out(self, trace: Trace) -> None:
        few = Trace(trace.header, trace.records[:5])
        data = few.to_bytes()
        last = len(encode_records(trace.records[4:5]))
        for cut in range(1, last + 1):
            assert Trace.from_bytes(data[:-cut]).records == trace.records[:4]
        assert Trace.from_bytes(data[: -last - 1]).records == trace.records[:3]

    def test_a_line_that_is_no_record_is_an_error(self, trace: Trace) -> None:
        data = Trace(trace.header, trace.records[:2]).to_bytes()
        with pytest.raises(PacelineError, match="this is not a paceline trace: "):
            Trace.from_bytes(data + b'["Record", 3]\n')

    @pytest.mark.parametrize(
        "data",
        [
            *(b"", b"\n", b"traceEvents", b"{}", b'["Record"]', b'["Header", 3]', b"\x80\x04K\x01.", b"PK\x03\x04"),
            *(b'["Head\xff"]', b"[" * 100_000),
        ],
        ids=lambda data: repr(data[:20]),
    )
    def test_something_else_is_an_error_of_one_line(self, data: bytes) -> None:
        with pytest.raises(PacelineError, match="this is not a paceline trace: ") as caught:
            Trace.from_bytes(data)
        assert len(str(caught.value).splitlines()) == 1


class TestStory:
    def test_of_one_worker_on_all_nodes(self, trace: Trace) -> None:
        story = trace.story(2)
        assert {record.node.role for record in story} == {"worker", "server"}
        assert {record.node for record in story if record.node.role == "worker"} == {Node("worker", 2)}
        for record in story:
            if not any(answers(record, 2)):
                if isinstance(record.event, PushArrived):
                    assert record.event.push.handle.source == 2
                if isinstance(record.event, PullArrived):
                    assert record.event.pull.worker == 2

    def test_leaves_nothing_of_it_out(self, trace: Trace) -> None:
        pushed = [r for r in trace if isinstance(r.event, PushArrived) and r.event.push.handle.source == 2]
        pulled = [r for r in trace if isinstance(r.event, PullArrived) and r.event.pull.worker == 2]
        own = [r for r in trace if r.node == Node("worker", 2)]
        story = trace.story(2)
        assert all(record in story for record in pushed + pulled + own)

    def test_says_who_released_it(self, trace: Trace) -> None:
        """The record that answers its parked pull is the push of somebody else."""
        released = [r for r in trace if any(answers(r, 2)) and isinstance(r.event, PushArrived)]
        assert released
        assert all(record.event.push.handle.source != 2 for record in released)
        assert all(record in trace.story(2) for record in released)


class TestReplay:
    @pytest.mark.parametrize("policy", [BSP(), ASP(), SSP(staleness=2), Backup(extra=1)], ids=str)
    def test_finds_nothing_when_nothing_changed(self, policy: CentralPolicy) -> None:
        trace = Trace.from_bytes(play(policy, workers=4, iterations=6, seed=11).trace.to_bytes())
        assert replay(trace, lambda node, header: parse(header.policy).machine(*node, header.members, 0)) == []

    def test_finds_where_another_policy_decides_otherwise(self) -> None:
        trace = play(SSP(staleness=1), workers=3, iterations=6, seed=2, faults=False).trace
        found = replay(trace, lambda node, header: machines_of(SSP(staleness=2), node, header))
        first = found[0]
        assert trace.records[first.index] == first.record
        assert [type(action).__name__ for action in first.record.actions] == ["Park"]
        assert [type(action).__name__ for action in first.replayed] == ["Answer"]

    def test_finds_an_altered_record(self) -> None:
        trace = play(ASP(), workers=2, iterations=4, seed=0, faults=False).trace
        index = next(i for i, record in enumerate(trace) if isinstance(record.event, PushArrived))
        record = trace.records[index]
        trace.records[index] = Record(record.node, record.incarnation, record.event, ())
        (found,) = replay(trace, lambda node, header: machines_of(ASP(), node, header))
        assert (found.index, found.replayed) == (index, record.actions)

    def test_keeps_the_lives_of_a_worker_apart(self) -> None:
        """Each incarnation has a machine of its own: a second life starts anew."""
        for seed in range(20):
            trace = play(BSP(), workers=3, iterations=6, seed=seed).trace
            if any(record.incarnation > 0 for record in trace):
                made: list[Node] = []

                def machine_of(node: Node, header: Header, made: list[Node] = made) -> Machine:
                    made.append(node)
                    return machines_of(BSP(), node, header)

                assert replay(trace, machine_of) == []
                lives = {(record.node, record.incarnation) for record in trace}
                assert len(made) == len(lives)
                return
        raise AssertionError("no run had a second life")
