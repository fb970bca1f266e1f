"""The timeline file: valid JSON that a viewer can lay out."""

from __future__ import annotations

import json

from paceline.core.actions import Apply, Drop
from paceline.report.chrome import chrome_trace
from paceline.report.metrics import spans


def test_chrome_trace(simulate):
    died = {"kill": [(3.0, 2, 0)], "views": [(4.0, ((0, 0), (1, 0)))]}
    runs = [
        ("bsp", simulate("bsp", [1.0, 0.7, 1.3], servers=2, latency_s=0.1, until_s=9.0, **died)),
        ("backup:extra=1", simulate("backup:extra=1", [0.3, 1.1, 0.1], until_s=9.0)),
    ]
    entries = json.loads(chrome_trace(runs))["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert [e["args"]["name"] for e in entries if e["name"] == "process_name"] == ["bsp", "backup:extra=1"]
    assert [name for (pid, _), name in named.items() if pid == 1] == [
        "server 0", "server 1", "worker 0", "worker 1", "worker 2",
    ]  # fmt: skip
    for pid, (_, trace) in enumerate(runs, start=1):
        mine = [entry for entry in entries if entry["pid"] == pid]
        for tid in {entry["tid"] for entry in mine}:
            end = 0.0
            for entry in mine:
                if entry["tid"] == tid and entry["ph"] == "X":
                    assert entry["dur"] >= 0
                    assert entry["ts"] >= end - 1e-3
                    end = entry["ts"] + entry["dur"]
        marks = [
            ("apply" if isinstance(action, Apply) else "drop", f"server {record.node.rank}")
            for record in trace
            for action in record.actions
            if isinstance(action, Apply | Drop)
        ]
        assert [(e["name"], named[pid, e["tid"]]) for e in mine if e["ph"] == "i"] == marks
        slices = [(e["name"], named[pid, e["tid"]]) for e in mine if e["ph"] == "X"]
        assert slices == [(span.kind, f"worker {span.worker}") for span in spans(trace)]
    waits = [entry["args"] for entry in entries if entry["name"] == "wait"]
    assert waits[0]["reason"] == "iteration 0 lacks worker 2"
    assert waits[0]["released by"] == "worker 2"
    assert "dead" in {entry["name"] for entry in entries}
    assert any(e["name"] == "drop" and e["args"]["reason"].startswith("late") for e in entries)


def test_no_runs():
    assert json.loads(chrome_trace([]))["traceEvents"] == []


def test_who_joins_later_has_a_name(simulate):
    trace = simulate("asp", [1.0, 1.0, 1.0, 1.0], workers=2, until_s=4.0, views=[(2.0, ((0, 0), (3, 0)))])
    entries = json.loads(chrome_trace([("asp", trace)]))["traceEvents"]
    names = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    assert {entry["tid"] for entry in entries if entry["ph"] == "X"} <= names.keys()
    assert names[1 + 1 + 3] == "worker 3"
