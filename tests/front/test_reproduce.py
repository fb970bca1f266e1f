"""`paceline reproduce`: the catalogue, one reproduction at a reduced size, what it prints and writes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import pytest

from paceline import cli, reproductions
from paceline.reproductions import CATALOGUE, Claim, Findings
from paceline.reproductions.async_local_sgd import AsyncLocalSGD
from paceline.reproductions.backup_choice import BackupChoice
from paceline.reproductions.backup_staleness import BackupStaleness
from paceline.reproductions.backup_sync_async import BackupSyncAsync
from paceline.reproductions.base import Reproduction
from paceline.reproductions.diloco import DiLoCo
from paceline.reproductions.elasticbsp import CONNECTED, CONVOLUTIONAL, ElasticBSPs
from paceline.reproductions.fluentps_lazy import FluentPSLazy
from paceline.reproductions.fluentps_pssp import FluentPSPSSP
from paceline.reproductions.hop_backup import HopBackup
from paceline.reproductions.hop_graphs import HopGraphs
from paceline.reproductions.hop_skip import HopSkip
from paceline.reproductions.hop_staleness import HopStaleness
from paceline.reproductions.specsync import SpecSyncSpeed
from paceline.reproductions.specsync_waiting import SpecSyncWaiting
from paceline.reproductions.zipline_search import ZipLineSearch

SMALL = [
    BackupChoice(machines=10, waited_for=(5, 8, 9, 10), interpolated=(5, 10), loss=2.3),
    BackupStaleness(epochs=1, staleness=(9, 19), rates=(0.05,), seeds=1, workers=4, layers=3),
    BackupSyncAsync(sizes=((6, 1), (12, 2)), rates=(0.01,), sgd_rates=(0.5,), gradients=100, accuracy=0.2),
    FluentPSPSSP(workers=4, iterations=12, one_in=(2, 10), seeds=1),
    FluentPSLazy(workers=4, iterations=10),
    ElasticBSPs(
        models=(replace(CONNECTED, rates=(0.3,)), replace(CONVOLUTIONAL, rates=(0.1,))),
        lookaheads=(4,), seeds=1, iterations=5, compute_s=(0.01,), rounds=20,
    ),
    ZipLineSearch(workers=(10, 50), lookaheads=(15,), matrices=2),
    SpecSyncSpeed(
        workers=5, smaller=(3,), rates=(0.5,), few_rates=(0.5,), pairs=((0.3, 0.2),), iterations=12, seeds=1, loss=2.2
    ),
    SpecSyncWaiting(workers=4, rates=(0.5,), delays_s=(0.0, 1.0, 5.0), iterations=40, seeds=1, loss=1.9),
    HopBackup(peers=6, iterations=8, graphs=("ring-based",)),
    HopStaleness(peers=6, iterations=8),
    HopSkip(peers=6, iterations=8),
    HopGraphs(peers=6, iterations=8, shares=(0.2,), sparse_to_dense=("ring", "complete")),
    DiLoCo(workload="digits-mlp", workers=2, iterations=8, lengths=(1, 2, 4)),
    AsyncLocalSGD(speeds=(2, 1), of_each=(1,), length=4, iterations=16, seeds=1),
]  # fmt: skip


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_name_has_a_paper_and_a_line(name: str) -> None:
    reproduction = reproductions.find(name)
    assert reproduction.name == name
    assert re.match(r"[A-Z][a-z]+ et al\. 20\d\d, ", reproduction.paper)
    assert reproduction.__doc__ is not None
    assert reproduction.__doc__.endswith(".")
    assert reproduction.steps > 0


@pytest.mark.parametrize("reproduction", SMALL, ids=lambda each: each.name)
def test_a_small_one_says_each_step_and_gives_plain_data(reproduction: Reproduction) -> None:
    said: list[str] = []
    findings = reproduction.run(0, said.append)
    assert len(said) == reproduction.steps
    data = json.loads(json.dumps(findings.data(reproduction.name, 0), allow_nan=False))
    assert list(data) == ["name", "seed", "rows", "claims"]
    assert data["rows"]
    for claim, written in zip(findings.claims, data["claims"], strict=True):
        assert claim.verdict.startswith("the same direction" if written["holds"] is True else "not reproduced")
        assert all(written[key] for key in ("claim", "paper", "ours"))
        assert set(written) == {"claim", "paper", "ours", "holds", "remark"}


def test_lazy_beats_the_soft_barrier_where_speeds_differ_for_good_and_the_server_is_slow() -> None:
    claims = FluentPSLazy(iterations=24).run(0, lambda line: None).claims
    assert [claim.holds for claim in claims[:3]] == [True, True, False]


def test_planned_barriers_beat_bsp_where_connections_differ_and_computing_is_short() -> None:
    small = ElasticBSPs(models=(), compute_s=(0.01, 0.4), rounds=60)
    gain = [small.throughput(compute_s, 0, lambda line: None)["times_bsp_gradients"] for compute_s in small.compute_s]
    assert gain[0] > 1.6
    assert 1.0 < gain[1] < 1.2
    latest, _, median = small.predict("log-normal 0.3", small.noises["log-normal 0.3"], 0)
    assert median["waited_ms"] < latest["waited_ms"] < latest["bsp_ms"]


def test_equal_seeds_give_equal_findings() -> None:
    small = FluentPSLazy(workers=4, iterations=10)
    first, again, other = (small.run(seed, lambda line: None).data("x", 0) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_the_command_prints_tables_and_verdicts_and_writes_json(monkeypatch, tmp_path, capsys) -> None:
    small = partial(FluentPSLazy, workers=4, iterations=10)
    monkeypatch.setitem(CATALOGUE, "fluentps-lazy", small)
    path = tmp_path / "out.json"
    assert cli.run(["reproduce", "fluentps-lazy", "--seed", "2", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert data["name"] == "fluentps-lazy"
    assert data["seed"] == 2
    assert len(data["rows"]) == 12
    out = capsys.readouterr().out
    assert "speeds differ for good, slow server, lazy" in out
    assert "1.21x (ResNet-56)" in out
    assert out.count("verdict:") == len(data["claims"])


def test_the_list_names_them_all(capsys) -> None:
    assert cli.run(["reproduce", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in CATALOGUE)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("reproduce backup-choise", "unknown reproduction 'backup-choise', did you mean 'backup-choice'?"),
        ("reproduce", "name what to reproduce (known: backup-choice"),
        ("reproduce backup-choice --seed -1", "seed=-1 is out of range: 0 or more"),
        ("reproduce backup-choice --json no/such/folder/x.json", "does not exist or cannot be written"),
    ],
)
def test_wrong_input_gets_one_line(line: str, said: str, capsys) -> None:
    assert cli.run(line.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_verdicts_say_what_came_out() -> None:
    assert Claim("a", "b", "c", True).verdict == "the same direction"
    assert Claim("a", "b", "c", False, "it hangs").verdict == "not reproduced: it hangs"


def test_rows_with_the_same_columns_are_one_table() -> None:
    findings = Findings([{"a": 1, "b": 2}, {"a": 3, "b": 4}, {"c": 5}])
    assert [len(table) for table in findings.tables()] == [2, 1]
