"""Traces of live processes: each node writes a file of its own, the driver puts them together."""

from __future__ import annotations

from pathlib import Path

from paceline.core.messages import Node
from paceline.core.trace import Header, Record, Trace, encode_record, read_records

SUFFIX = ".trace"


class TraceFile:
    """The records of one node, written as they happen. What a killed process had not flushed is lost."""

    def __init__(self, folder: Path, node: Node, incarnation: int) -> None:
        path = folder / f"{node.role}-{node.rank}.{incarnation}{SUFFIX}"
        self.file = path.open("wb", buffering=1 << 14)

    def write(self, record: Record) -> None:
        self.file.write(encode_record(record))

    def flush(self) -> None:
        """Worth doing when there is nothing else to do."""
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def gather(folder: Path, header: Header) -> Trace:
    """All nodes' records in time order. Each node's own order is kept."""
    records: list[Record] = []
    for path in sorted(folder.glob("*" + SUFFIX)):
        records.extend(read_records(path.read_bytes()))
    records.sort(key=lambda record: record.event.at)
    return Trace(header, records)
