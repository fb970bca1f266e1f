"""What happened: every event with the actions it led to, node by node, and the means to run it again.

A trace is a header and records. As bytes it is one JSON value a line, arrays instead of objects, so that it is
small, greppable and equal byte for byte when the run was equal. `replay` feeds the events into fresh machines
and compares the actions: it holds for virtual runs and for live ones, since machines are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
from msgspec import Struct

from paceline.core.actions import Action, Answer, Send
from paceline.core.events import Event
from paceline.core.machine import Machine
from paceline.core.messages import Members, Node
from paceline.errors import PacelineError


class Header(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """What is needed to make the machines again, and the size of each shard's slice in bytes."""

    runtime: str
    policy: str
    members: Members
    seed: int
    slice_bytes: tuple[int, ...]
    clips_mean: bool = False
    """Whether the shards ask for the norm of each mean."""
    local_steps: str = ""
    """The local steps of the run as text, where it has some: its iterations are rounds."""


class Record(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """One step of one machine. `incarnation` tells the processes of a rank apart; servers have 0."""

    node: Node
    incarnation: int
    event: Event
    actions: tuple[Action, ...]


class Trace:
    """A header and the records of all nodes, in time order."""

    def __init__(self, header: Header, records: Iterable[Record] = ()) -> None:
        self.header = header
        self.records = list(records)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self.header) + b"\n" + encode_records(self.records)

    @classmethod
    def from_bytes(cls, data: bytes) -> Trace:
        header, _, rest = data.partition(b"\n")
        try:
            return cls(msgspec.json.decode(header, type=Header), read_records(rest))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise PacelineError(f"this is not a paceline trace: {error}") from None

    def story(self, worker: int) -> list[Record]:
        """Returns what concerns one worker or peer, on all nodes: the first thing to read when it does something
        odd."""
        return [record for record in self.records if _concerns(record, worker)]


def encode_records(records: list[Record]) -> bytes:
    """Writes records as the lines of a trace file."""
    return msgspec.json.Encoder().encode_lines(records)


def read_records(data: bytes) -> list[Record]:
    """Reads the records in `data`, but for a last line that a killed process has cut short."""
    decode = msgspec.json.Decoder(Record).decode
    whole, _, _ = data.rpartition(b"\n")
    return [decode(line) for line in whole.split(b"\n") if line]


class Divergence(Struct, frozen=True):
    """A step whose actions came out differently when it was replayed."""

    index: int
    record: Record
    replayed: tuple[Action, ...]


def replay(trace: Trace, machine_of: Callable[[Node, Header], Machine]) -> list[Divergence]:
    """Feeds every recorded event into fresh machines, and returns the steps that came out differently."""
    machines: dict[tuple[Node, int], Machine] = {}
    diverged = []
    for index, record in enumerate(trace):
        key = (record.node, record.incarnation)
        if key not in machines:
            machines[key] = machine_of(record.node, trace.header)
        actions = tuple(machines[key].handle(record.event))
        if actions != record.actions:
            diverged.append(Divergence(index, record, actions))
    return diverged


def _concerns(record: Record, worker: int) -> bool:
    if record.node in (("worker", worker), ("peer", worker)):
        return True
    push = getattr(record.event, "push", None)
    pull = getattr(record.event, "pull", None)
    if (push is not None and push.handle.source == worker) or (pull is not None and pull.worker == worker):
        return True
    return any(_is_for(action, worker) for action in record.actions)


def _is_for(action: Action, worker: int) -> bool:
    if isinstance(action, Send):
        return action.to in (("worker", worker), ("peer", worker))
    return isinstance(action, Answer) and action.parameters.worker == worker
