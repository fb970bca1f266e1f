"""The page: well-formed, alone in the world, honest in words, and safe with hostile names."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import msgspec
import pytest

from paceline.report import html as page
from paceline.report.charts import axis
from paceline.report.histograms import bar_width, gathered
from paceline.report.html import RunView, render, write
from paceline.report.markup import count, seconds, share
from paceline.report.metrics import measure, spans
from paceline.report.report_model import run_labels, speed_up, target_of, verdict
from paceline.report.timeline import MOST_BARS, condense, shown
from paceline.report.worker_spans import Span

VOID = {"meta", "wbr"}
TARGET = {"target": "accuracy=0.9", "workload": "digits", "workers": 2, "servers": 1, "seed": 3}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what there is."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute is given twice: {attrs}"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, tag: str, **attributes: str) -> int:
        wanted = attributes.items()
        return sum(name == tag and all(given.get(k) == v for k, v in wanted) for name, given in self.tags)


def view(policy="bsp", reached=None, trace=None, history=None, runtime="virtual", **summary) -> RunView:
    measured = msgspec.to_builtins(measure(trace)) if trace is not None else {}
    if history is None:
        history = [
            {"time_s": float(t), "updates": t, "loss": 2 / (1 + t), "accuracy": 1 - 1 / (1 + t)} for t in range(9)
        ]
    whole = {"policy": policy, "time_to_target_s": reached, **measured, **summary}
    return RunView(policy, runtime, history, whole, spans(trace) if trace is not None else [])


@pytest.fixture
def four(simulate):
    """Four runs of 8 workers, one of which dies and comes back."""

    def uneven(worker, iteration):
        return 0.1 * (1 + worker % 3) * (5 if (worker * 7 + iteration * 3) % 11 == 0 else 1)

    without = tuple((w, 0) for w in range(8) if w != 3)
    again = tuple((w, int(w == 3)) for w in range(8))
    runs = []
    for policy, reached in (("bsp", 8.0), ("asp", 5.0), ("ssp:staleness=3", 4.0), ("backup:extra=1", None)):
        trace = simulate(
            policy, uneven, workers=8, servers=2, latency_s=0.01, until_s=20.0,
            kill=[(4.5, 3, 0)], views=[(5.0, without), (6.0, again)],
        )  # fmt: skip
        runs.append(view(policy, reached, trace, final={"loss": 0.2, "accuracy": 0.93}))
    return runs


def assert_loads_nothing(source: str, parsed: Page) -> None:
    assert not re.search(r"https?://|url\(|@import|\bfetch\b|\bimport\b|XMLHttpRequest|WebSocket", source)
    loading = {"src", "href", "xlink:href", "srcset", "data", "action", "poster"}
    assert not [tag for tag, given in parsed.tags if loading & given.keys()]
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in parsed.tags}


def test_the_whole_page(four):
    source = render(four, TARGET)
    parsed = Page(source)
    assert_loads_nothing(source, parsed)
    assert len(source.encode()) < 1_000_000
    assert "ssp:staleness=3 reached accuracy=0.9 in 4.00 s, 2.0× sooner than bsp; " in parsed.text
    assert "; backup:extra=1 did not reach it." in parsed.text
    for words in ("2.00×", "baseline", "missed", "virtual time", "2 workers", "seed 3", "target 0.9"):
        assert words in parsed.text
    assert parsed.count("polyline") == 8
    assert parsed.count("button") == 4
    assert parsed.count("rect", **{"class": "dead"}) == 4
    assert parsed.count("rect", **{"class": "wait"}) > 50
    assert "gone, 1.00 s from 5.00 s" in source
    assert re.search(r"waiting after iteration \d+, [^<]+: iteration \d+ lacks [^<]+; released by worker", source)
    assert render(four, TARGET) == source


def test_hostile_names_stay_text():
    hostile = """</style></script><script>alert(1)</script>"'><img src=x onerror=alert(2)>&amp;"""
    bad = [Span(0, 0, "wait", 0.0, 1.0, 0, hostile, 0), Span(0, 0, "compute", 1.0, 2.0, 1)]
    run = view(hostile, 2.0, runtime=hostile, history=[{"time_s": 0.0, "loss": 1.0, "accuracy": 0.5}] * 2)
    run.spans = bad
    config = {"target": "accuracy=0.9", hostile: hostile, "workload": hostile, "nested": {hostile: [hostile]}}
    source = render([run, view("asp")], config)
    parsed = Page(source)
    assert_loads_nothing(source, parsed)
    assert parsed.count("script") == 1
    assert not [name for _, given in parsed.tags for name in given if name.startswith("on")]
    assert hostile in "".join(parsed.words)


@pytest.mark.parametrize(
    "run",
    [
        view(history=[]),
        view(history=[{"time_s": 1.0, "updates": 3, "loss": 1.0, "accuracy": None}]),
        view(history=[{"time_s": 0.0, "updates": 0, "loss": 1.0, "accuracy": 0.5}]),
        view(history=[{"time_s": t, "loss": loss} for t, loss in enumerate([1.0, 9.0, math.inf, math.nan])]),
        view(history=[{"time_s": 0.0, "updates": 0, "loss": 0.0, "accuracy": 0.0}] * 3),
        view(history=[{"time_s": None, "updates": 0, "loss": -5.0, "accuracy": 0.0}]),
        view(final={"loss": None, "accuracy": None}, staleness={}, bytes=None, wait_share=math.nan),
        view(reached=0.0),
    ],
)
@pytest.mark.parametrize("config", [{}, TARGET, {"target": "loss=0.1"}, {"target": "soon"}, {"target": None}])
def test_odd_runs_make_a_page(run, config):
    for runs in ([run], [run, view("asp", 3.0)], [view("asp", 3.0), run]):
        source = render(runs, config)
        drawn = re.findall(r'(?:points|d|style|x|width)="([^"]*)"', source)
        assert not re.search(r"\b(nan|inf|None)\b", Page(source).text + " ".join(drawn))


def test_no_runs():
    assert "No run to show." in Page(render([], {})).text


def test_charts_that_have_nothing_to_show_are_left_out():
    history = [{"time_s": float(t), "loss": 1.0, "accuracy": None} for t in range(3)]
    source = render([view(history=history)], {})
    assert "<figcaption>Loss" in source
    assert "<figcaption>Accuracy" not in source
    assert "No evaluation was recorded." in Page(render([view(history=[])], {})).text


def test_a_diverged_run_is_cut_and_the_page_says_so():
    wild = view("asp", history=[{"time_s": float(t), "loss": 10.0**t} for t in range(6)])
    source = render([view(), wild], {})
    assert "Losses above" in Page(source).text
    heights = [float(y) for line in re.findall(r'points="([^"]*)"', source) for y in re.findall(r",(\S+)", line)]
    assert min(heights) >= 0.0
    assert max(heights) <= 1000.0


def test_points_are_where_they_belong():
    """Accuracy 0 at 0 s, 0.5 at 1 s, 1 at 4 s: x in thousandths of 4 s, y down from the top."""
    history = [{"time_s": t, "accuracy": a} for t, a in ((0.0, 0.0), (1.0, 0.5), (4.0, 1.0))]
    assert 'points="0,1000 250,500 1000,0"' in render([view(history=history)], {})


def test_a_long_history_is_thinned_but_keeps_its_end():
    history = [{"time_s": float(t), "loss": 1.0 if t < 4999 else 0.0} for t in range(5000)]
    points = re.search(r'points="([^"]*)"', render([view(history=history)], {}))[1].split()
    assert len(points) <= 401
    assert points[-1] == "1000,1000"


RACES = [
    ([("bsp", 23.4), ("ssp:staleness=3", 12.3)],
     "ssp:staleness=3 reached accuracy=0.9 in 12.3 s, 1.9× sooner than bsp."),
    ([("bsp", 10.0), ("asp", 12.0), ("ssp", 20.0)],
     "bsp reached accuracy=0.9 in 10.0 s, 1.2× sooner than asp (the next)."),
    ([("asp", 10.0), ("ssp", 5.0)], "ssp reached accuracy=0.9 in 5.00 s, 2.0× sooner than asp."),
    ([("bsp", None), ("asp", 5.0)], "asp reached accuracy=0.9 in 5.00 s; bsp did not reach it."),
    ([("bsp", None), ("asp", None)], "None of the 2 runs reached accuracy=0.9."),
    ([("bsp", None)], "bsp did not reach accuracy=0.9."),
    ([("bsp", 5.0)], "bsp reached accuracy=0.9 in 5.00 s."),
    ([("bsp", 5.1), ("asp", 5.0)], "asp reached accuracy=0.9 in 5.00 s, 2.0 % sooner than bsp."),
    ([("bsp", 5.0), ("asp", 5.0)], "bsp reached accuracy=0.9 in 5.00 s, at the same time as asp."),
]  # fmt: skip


@pytest.mark.parametrize(("times", "expected"), RACES)
def test_verdict(times, expected):
    assert verdict([view(policy, reached) for policy, reached in times], target_of(TARGET)) == expected


def test_verdict_without_a_target():
    runs = [view("bsp", final={"loss": 0.5}, time_s=9.0), view("asp", final={"loss": 0.25}, time_s=9.0)]
    assert verdict(runs, None) == "asp ended with the lowest loss, 0.25 after 9.00 s; no target was set."


def test_live_and_virtual_seconds_are_not_compared():
    runs = [view("bsp", 10.0), view("bsp", 3.0, runtime="live")]
    runs += [view("asp", 5.0), view("asp", 2.0, runtime="live")]
    assert run_labels(runs) == ["bsp (virtual)", "bsp (live)", "asp (virtual)", "asp (live)"]
    assert [speed_up(index, runs, target_of(TARGET)) for index in range(4)] == [1.0, 1.0, 2.0, 1.5]
    said = verdict(runs, target_of(TARGET))
    assert "asp (virtual) reached accuracy=0.9 in 5.00 s, 2.0× sooner than bsp (virtual)." in said
    assert "asp (live) reached accuracy=0.9 in 2.00 s, 1.5× sooner than bsp (live)." in said


def test_without_a_target_times_are_compared_over_equal_work():
    runs = [view("bsp", gradients=100, time_s=9.0), view("asp", gradients=100, time_s=6.0)]
    runs.append(view("backup", gradients=80, time_s=3.0))
    assert [speed_up(index, runs, None) for index in range(3)] == [1.0, 1.5, None]
    assert "1.50×" in Page(render(runs, {})).text


def test_labels_of_equal_policies_differ():
    assert run_labels([view("bsp"), view("asp"), view("bsp")]) == ["bsp #1", "asp", "bsp #2"]


def test_many_workers_and_iterations_are_cut_and_the_page_says_so():
    run = view()
    run.spans = [
        Span(worker, 0, kind, at + off, at + off + 0.5, at)
        for worker in range(64)
        for at in range(200)
        for kind, off in (("compute", 0.0), ("exchange", 0.5))
    ]
    source = render([run], {})
    assert "first 39.5 s of 200 s, 32 of 64 workers" in Page(source).text
    assert Page(source).count("rect", **{"class": "compute"}) == 32 * 40


def test_too_many_spans_are_joined_without_gaps():
    row = [
        Span(0, 0, kind, at + off, at + end, at)
        for at in range(5000)
        for kind, off, end in (("compute", 0.0, 0.75), ("wait", 0.75, 1.0))
    ]
    row.append(Span(0, 0, "dead", 5000.0, 9000.0))
    rows = condense([row, row], 9000.0)
    assert 100 < sum(map(len, rows)) <= MOST_BARS
    for bars in rows:
        assert (bars[0].start_s, bars[-1].end_s) == (0.0, 9000.0)
        assert [bar.start_s for bar in bars[1:]] == [bar.end_s for bar in bars[:-1]]
        assert {bar.kind for bar in bars[:-2]} == {"compute"}
        assert re.fullmatch(r"\d+ spans, .* from 0 s: (7|8)\d % computing, .* waiting for others", bars[0].title)
        assert bars[-1].kind == "dead"


def test_write_replaces_the_file_or_leaves_it(tmp_path, monkeypatch):
    path = tmp_path / "run.html"
    write(path, [view()], TARGET)
    before = path.read_text(encoding="utf-8")
    assert before == render([view()], TARGET)

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(page.os, "fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        write(path, [view("asp")], TARGET)
    assert path.read_text(encoding="utf-8") == before
    assert [file.name for file in tmp_path.iterdir()] == ["run.html"]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (0.0, 30.0, (0.0, 10.0, 20.0, 30.0)),
        (0.93, 0.99, (0.92, 0.94, 0.96, 0.98, 1.0)),
        (3.0, 3.0, (2.4, 2.6, 2.8, 3.0, 3.2, 3.4, 3.6)),
        (0.0, 0.0, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
    ],
)
def test_axis(low, high, ticks):
    made = axis(low, high)
    assert made.ticks == pytest.approx(ticks)
    assert made.low <= low <= high <= made.high


def test_axis_labels_have_the_decimals_of_the_step():
    assert [axis(0.9, 1.0).label(tick) for tick in axis(0.9, 1.0).ticks][:2] == ["0.90", "0.92"]
    assert axis(0.0, 20000.0).label(10000.0) == "10000"


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0 s"), (0.0004, "400 µs"), (0.412, "412 ms"), (3.2, "3.20 s"), (12.34, "12.3 s"), (845.2, "845 s"),
     (0.9999, "1.00 s"), (9.999, "10.0 s"), (7320, "2 h 2 min")],
)  # fmt: skip
def test_seconds(value, said):
    assert seconds(value) == said


def test_counts_and_shares():
    assert (count(12400), count(2.5), count(7.0)) == ("12\u202f400", "2.5", "7")
    assert (share(0.0), share(0.0001), share(0.032), share(0.674)) == ("0 %", "<0.1 %", "3.2 %", "67 %")


class TestStaleness:
    def test_bars_stand_for_one_value_or_for_many(self):
        assert [bar_width(largest) for largest in (0, 39, 40, 100, 999, 2500)] == [1, 1, 2, 5, 50, 100]
        assert gathered({0: 5, 1: 1, 7: 2, 30: 1}, width=2, bars=4) == [6, 0, 0, 3]

    def test_a_histogram_for_each_run_that_has_one(self, simulate):
        traces = [simulate(policy, [1.0, 1.0, 3.0], until_s=20.0) for policy in ("bsp", "asp")]
        runs = [view("bsp", trace=traces[0]), view("asp", trace=traces[1]), view("empty")]
        for run, trace in zip(runs, traces, strict=False):
            run.staleness = measure(trace).staleness_counts
        page = Page(render(runs, {}))
        assert page.count("figure", **{"class": "histogram"}) == 2
        assert "How stale the gradients were" in page.text
        assert "staleness 0: 100 %" in page.text
        assert f"at most {max(runs[1].staleness)}" in page.text

    def test_what_lies_far_out_is_in_the_last_bar(self):
        run = view("asp")
        run.staleness = {0: 900, 1: 899, 5000: 1}
        assert "staleness 1 or more: 50 %" in Page(render([run], {})).text

    def test_without_any_there_is_no_section(self):
        assert "How stale" not in Page(render([view("asp")], {})).text


def test_a_long_name_is_not_a_column_heading():
    mine = "/home/somebody/a/long/way/down/policies.py:Mine:length=2"
    page = Page(render([view(mine), view("asp")], {})).text
    assert "vs the first" in page
    assert f"vs {mine}" not in page


def test_all_of_it_is_not_called_the_first_part():
    run = view("bsp")
    run.spans = [Span(0, 0, "compute", 0.0, 5.9531)]
    assert shown(run, 1, 5.9527) == "all 5.95 s"
    assert shown(run, 1, 3.0) == "first 3.00 s of 5.95 s"
