"""Reads what a run writes, from another process: traces and the driver's feed as they grow, or what an ended run left.

Nothing is asked of the run: files are read as they are, a part each time. Who comes late begins near the end of long
traces, after a look through what it passes over for changes of membership.
"""

from __future__ import annotations

import heapq
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.messages import Members
from paceline.core.step_times import Row
from paceline.core.trace import Header, Record
from paceline.errors import ConfigError
from paceline.folder_lock import is_in_use
from paceline.watching import driver_records, snapshot
from paceline.watching.driver_records import Begun, DriverRecord
from paceline.watching.snapshot import Snapshot
from paceline.watching.view import RunWatch

HOLD_S = 0.5
"""Records are buffered by who writes them; those of all are put in order when they are so old."""
PASSED_OVER = 4 << 20
"""Of a file with more than this to be read, only the last part is."""
TAIL = 1 << 20
AT_ONCE = 16 << 20
VIEW = b'"ViewChanged"'
CONFIG, METRICS, TRACE, LIVE = "config.json", "metrics.json", "trace.jsonl", "live.json"
TIMES = "times.jsonl"
"""Files of a run's folder (run_folder.py, which needs torch)."""


class GrowingFile:
    """A file of lines that somebody appends to."""

    def __init__(self, path: Path, whole: bool = False) -> None:
        self.path = path
        self.offset = 0
        self.whole = whole
        """Whether nothing of it may be passed over."""
        self.passed_over = False

    def read(self) -> tuple[list[bytes], list[bytes]]:
        """Returns the lines that are new, and lines with views among those it has passed over."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self.offset:  # another file under this name
                    self.offset = 0
                views: list[bytes] = []
                if size - self.offset > PASSED_OVER and not self.whole:
                    views = self._pass_over(file.fileno(), size - TAIL)
                file.seek(self.offset)
                data = file.read(AT_ONCE) or b""
        except OSError:
            return [], []
        end = data.rfind(b"\n") + 1
        self.offset += end
        return data[:end].splitlines(), views

    def _pass_over(self, descriptor: int, until: int) -> list[bytes]:
        views, rest = [], b""
        self.passed_over = True
        while self.offset < until and (data := os.pread(descriptor, min(AT_ONCE, until - self.offset), self.offset)):
            self.offset += len(data)
            lines = rest + data
            at = lines.find(VIEW)
            while at >= 0:
                start, end = lines.rfind(b"\n", 0, at) + 1, lines.find(b"\n", at)
                if end < 0:
                    break
                views.append(lines[start:end])
                at = lines.find(VIEW, end)
            rest = lines[lines.rfind(b"\n") + 1 :]
        self.offset -= len(rest)
        return views


class RunReader:
    """Follows the run in a folder: `poll` now and then, then `snapshot`."""

    def __init__(
        self, folder: Path, iterations: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = folder
        self.clock = clock
        self.config = read_config(folder)
        self.iterations = iterations
        self.feed = GrowingFile(folder / driver_records.NAME, whole=True)
        self.begin()

    def begin(self) -> None:
        """Begins with what there is."""
        self.watch = RunWatch(self.folder.name, str(self.config.get("script") or ""), self.iterations)
        self.files: dict[str, GrowingFile] = {}
        self.rows: list[Row] = []
        """What processes have measured of themselves, until the records of that time have been taken."""
        self.pending: list[tuple[float, int, Record]] = []
        self.number = 0
        self.now = 0.0
        self.state = snapshot.STARTING
        self.is_read = False
        self.damaged = 0

    def poll(self) -> None:
        """Reads what is new."""
        if self.is_read:
            if self.goes_on():  # it was resumed
                self.begin()
            else:
                return
        goes_on = self.goes_on()
        self._read_feed()
        if goes_on or (self.folder / "trace").is_dir():
            self._read_traces()
        begun = self.watch.begun
        if goes_on:
            if begun is not None:
                self.now = max(self.now, self.clock() - begun.epoch_s - HOLD_S)
                self._release(self.now)
            else:  # not yet, or its driver could not write that down
                self._release(float("inf"))
                self.now = self.watch.builder.last_s
            self.state = snapshot.RUNS if begun is not None or self.watch.builder.lanes else snapshot.STARTING
            return
        self._read_feed()
        if not self.files:
            self._read_left()
        elif (self.folder / "trace").is_dir():
            self._read_traces()
        self._release(float("inf"))
        self.now = self.watch.builder.last_s
        self.state = snapshot.ENDED if self.watch.ended is not None else snapshot.LOST
        self.is_read = True

    def snapshot(self, lanes: tuple[int, ...] | None = None) -> Snapshot:
        return self.watch.snapshot(self.now, self.state, lanes)

    def goes_on(self) -> bool:
        """Whether the driver of the run is there."""
        try:
            shared = Path(json.loads((self.folder / LIVE).read_text(encoding="utf-8"))["folder"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return is_in_use(shared)

    def _read_feed(self) -> None:
        lines, _ = self.feed.read()
        records = list(self._decoded(driver_records.decode, lines))
        for place, record in enumerate(records):
            if isinstance(record, Begun) and self.watch.begun is not None:
                self.begin()  # what was before is of an earlier part of the run
                for later in records[place:]:
                    self.watch.take_driver(later)
                return
            self.watch.take_driver(record)

    def _decoded(self, read: Callable[[list[bytes]], list[Any]], lines: list[bytes]) -> Iterable[Any]:
        try:
            return read(lines)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            out: list[Any] = []
            for line in lines:
                try:
                    out += read([line])
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    self.damaged += 1
            return out

    def _read_traces(self) -> None:
        try:
            names = sorted(name for name in os.listdir(self.folder / "trace") if name.endswith((".trace", ".times")))
        except OSError:
            return
        for name in names:
            file = self.files.get(name)
            if file is None:
                file = self.files[name] = GrowingFile(self.folder / "trace" / name)
            (self._take if name.endswith(".trace") else self._take_rows)(file)

    def _take_rows(self, file: GrowingFile) -> None:
        lines, _ = file.read()
        decode = msgspec.json.Decoder(Row).decode
        self.rows += self._decoded(lambda read: [decode(line) for line in read if line], lines)

    def _take(self, file: GrowingFile) -> None:
        lines, views = file.read()
        self.watch.skipped |= file.passed_over
        decode = msgspec.json.Decoder(Record).decode
        for record in self._decoded(lambda read: [decode(line) for line in read if line], views + lines):
            self.number += 1
            heapq.heappush(self.pending, (record.event.at, self.number, record))

    def _release(self, until: float) -> None:
        pending, take = self.pending, self.watch.take
        while pending and pending[0][0] <= until:
            take(heapq.heappop(pending)[2])
        later = []
        for row in self.rows:
            if getattr(row, "at", 0.0) <= until:
                self.watch.take_row(row)
            else:
                later.append(row)
        self.rows = later

    def _read_left(self) -> None:
        """Reads what an ended run has left in one file."""
        path = self.folder / TRACE
        try:
            with open(path, "rb") as file:
                header = msgspec.json.decode(file.readline(), type=Header)
        except (OSError, msgspec.MsgspecError):
            header = None
        if header is not None and self.watch.begun is None:
            members: Members = header.members
            begun = Begun(0.0, 0.0, header.policy, members.workers, members.servers, header.slice_bytes)
            self.watch.take_driver(begun)
        self._take_metrics()
        trace = GrowingFile(path)
        if header is not None:
            with open(path, "rb") as file:
                trace.offset = len(file.readline())
            while True:
                before = trace.offset
                self._take(trace)
                if trace.offset == before:
                    break
            self._take_rows(GrowingFile(self.folder / TIMES))

    def _take_metrics(self) -> None:
        """Takes what `metrics.json` says of a run without a feed."""
        try:
            metrics = json.loads((self.folder / METRICS).read_text(encoding="utf-8"))
            records: list[DriverRecord] = []
            if not self.watch.metrics:
                for point in metrics["history"]:
                    values = {name: value for name, value in point.items() if name not in ("time_s", "updates")}
                    records.append(driver_records.Logged(point["time_s"], point["updates"], values))
            if self.watch.ended is None and metrics.get("ended"):
                at, failures = metrics["summary"]["time_s"], tuple(metrics.get("failures", ()))
                records.append(driver_records.Ended(at, metrics["ended"], failures))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return
        for record in records:
            self.watch.take_driver(record)


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the configuration of the run in a folder; refuses a folder that holds none."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{str(folder)!r} is not a run's folder: it has no readable {CONFIG}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{str(folder / CONFIG)!r} is not a run's configuration")
    return config
