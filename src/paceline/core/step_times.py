"""What an iteration's time went to, and a server's: measured by the processes of a live run, beside its trace.

The trace says what was decided and when; these rows say what took how long. Each process writes one row about itself,
then a worker or a peer one for each iteration and a server one for each turn of its loop in which it heard of a
gradient or answered. As bytes they are one JSON array a line, as in a trace. Of a long run only some rows are there
(`runtime/live/storage/trace_files.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from paceline.core.messages import Node
from paceline.errors import PacelineError


class ProcessRow(Struct, frozen=True, array_like=True, tag="process", gc=False):
    """Where a process runs: its host, the cores it may use, the threads that torch uses in it.

    `links` has how a worker reaches each server: "memory", "tcp", or "tcp with keys".
    """

    node: Node
    incarnation: int
    host: str
    cores: int
    threads: int
    links: tuple[str, ...] = ()


class StepRow(Struct, frozen=True, array_like=True, tag="step", gc=False):
    """What one iteration of a worker or a peer was spent on, in seconds; it ended at `at`.

    `data_s` lasts until the script calls its closure or `zero_grad`, `compute_s` until it steps: forward and backward.
    `injected_s` is what the scenario has added, `copy_s` is checking and copying the gradient, `push_s` handing it to
    the servers, `answer_s` waiting for the parameters and taking them over. `cpu_s` is the processor time of the
    process until it pushed, `exchange_cpu_s` that from then on, `gc_s` the time of garbage collections in it.
    """

    rank: int
    incarnation: int
    at: float
    iteration: int
    data_s: float
    compute_s: float
    injected_s: float
    copy_s: float
    push_s: float
    answer_s: float
    cpu_s: float
    exchange_cpu_s: float
    gc_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole iteration."""
        return self.data_s + self.compute_s + self.injected_s + self.copy_s + self.push_s + self.answer_s


class TurnRow(Struct, frozen=True, array_like=True, tag="turn", gc=False):
    """What a server did between two waits, which ended at `at`: how long it was busy, and with what.

    It heard of `pushes`, took `steps` on `gradients` in all, and sent `answers`.
    """

    shard: int
    incarnation: int
    at: float
    busy_s: float
    cpu_s: float
    pushes: int
    steps: int
    gradients: int
    answers: int


Row = ProcessRow | StepRow | TurnRow


def encode_rows(rows: Iterable[Row]) -> bytes:
    """Writes rows as the lines of a file."""
    return msgspec.json.Encoder().encode_lines(rows)


def read_rows(data: bytes) -> list[Row]:
    """Reads the rows in `data`, but for a last line that a killed process has cut short."""
    decode = msgspec.json.Decoder(Row).decode
    whole, _, _ = data.rpartition(b"\n")
    try:
        return [decode(line) for line in whole.split(b"\n") if line]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PacelineError(f"these are not times of a run: {error}") from None
