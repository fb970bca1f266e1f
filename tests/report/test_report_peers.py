"""What is said of runs without servers: peers, updates and what was sent, nothing of shards, pushes and pulls."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import pytest

from paceline import simulate
from paceline.commands.live_table import LiveTable
from paceline.commands.terminal import show_table, size_of
from paceline.core.messages import Members
from paceline.core.trace import Trace
from paceline.function_workers import function_starter
from paceline.policies import parse
from paceline.report.html import render
from paceline.run import Run
from paceline.runtime.live.driver.driver import Driver, RunPlan

OF_SERVERS = re.compile(r"shard|worker|server|push|pull|DPR")


@pytest.fixture(scope="module")
def hop() -> Run:
    return simulate("quadratic", "hop:graph=ring", workers=3, cluster="one-slow:factor=3", iterations=4)


@pytest.fixture(scope="module")
def bsp() -> Run:
    return simulate("quadratic", "bsp", workers=3, cluster="one-slow:factor=3", iterations=4)


def words_of(runs: list[Run]) -> str:
    """What is read on the page, less styles, scripts and the configuration, which is as it was given."""
    page = render([run.view() for run in runs], runs[0].config).partition("<h2>Configuration")[0]
    page = re.sub(r"<(style|script)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_a_page_of_peers_does_not_speak_of_servers(hop: Run) -> None:
    words = words_of([hop])
    assert OF_SERVERS.findall(words) == []
    assert "3 peers" in words
    assert "MB sent" in words
    assert "How stale the updates were" in words
    assert "peer 0" in words, "it was waited for"


def test_a_page_of_both_says_which_word_is_of_whom(hop: Run, bsp: Run) -> None:
    words = words_of([bsp, hop])
    assert "MB pushed / pulled, or sent" in words
    assert "DPRs per 100" in words
    assert "staleness, of peers" in words
    assert "dropped, of peers" in words
    assert "of peers" not in words_of([bsp])


def test_what_was_sent_is_in_its_column(hop: Run) -> None:
    assert hop.summary()["bytes"]["update"] > 0
    cells = re.findall(r"<td[^>]*>(.*?)</td>", render([hop.view()], {}).partition("</table>")[0])
    assert cells[-1] != "0 / 0"
    assert " / " not in cells[-1]


def test_the_distance_at_the_end_is_in_the_summary(hop: Run, bsp: Run) -> None:
    assert hop.summary()["distance"] == hop.consensus[-1][1]
    assert "distance" not in bsp.summary()


def test_the_tables_in_a_terminal(hop: Run, bsp: Run, capsys: pytest.CaptureFixture[str]) -> None:
    show_table([hop], "one")
    out = capsys.readouterr().out
    assert "updates" in out
    assert "gradients" not in out
    show_table([bsp], "one")
    assert "gradients" in capsys.readouterr().out
    show_table([bsp, hop], "both")
    out = capsys.readouterr().out
    assert "dropped" in out
    assert "gradients" not in out
    assert size_of(Members(1, 0)) == "1 peer"


def test_the_live_table_speaks_of_peers() -> None:
    headings = {}
    for policy in ("hop:graph=ring", "bsp"):
        table = LiveTable(policy, None)
        driver = Driver(RunPlan(Members(2, 0), function_starter(print), parse(policy)))
        table.parts = driver.parts
        driver.close()
        headings[policy] = [str(column.header) for column in table.render().columns][:3]
    assert headings["hop:graph=ring"] == ["peer", "iteration", "steps/s"]
    assert headings["bsp"] == ["worker", "iteration", "pushes/s"]


def test_one_distance_alone_is_in_the_table_and_not_drawn(hop: Run) -> None:
    live = replace(hop, runtime="live", trace=Trace(hop.trace.header, hop.trace.records), consensus=[(1.0, 0.125)])
    words = words_of([live])
    assert "Distance from the average" not in words
    assert "0.125" in words
