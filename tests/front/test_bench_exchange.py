"""`paceline bench exchange`: what it prints and writes, at sizes that say nothing of speed."""

from __future__ import annotations

import json

import pytest

from paceline import cli
from paceline.bench import competitors
from paceline.bench.tcp_exchange import loopback_bandwidth


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.ci)], ids=["pretended", "real"])
def compared(request, monkeypatch) -> None:
    """Without Ray, which takes its time to start; the others take theirs, too: each rank has an interpreter."""
    monkeypatch.setattr(competitors, "has_ray", lambda: False)
    if not request.param:
        monkeypatch.setattr(competitors, "measure", lambda peer, size, options: [1000.0 + rank for rank in range(size)])


@pytest.mark.usefixtures("compared")
def test_the_exchange_through_shared_memory(tmp_path, capsys) -> None:
    path = tmp_path / "out.json"
    small = ["--params", "30000", "--workers", "2", "--rounds", "1"]
    assert cli.run(["bench", "exchange", *small, "--json", str(path)]) == 0
    asp, bsp = json.loads(path.read_text())["rows"]
    assert [(row["mode"], row["unit"], set(row["peers"])) for row in (asp, bsp)] == [
        ("asp", "pushes/s", {"torch_rpc"}),
        ("bsp", "ms", {"ddp"}),
    ]
    assert asp["ratio"] == pytest.approx(asp["paceline"] / asp["peers"]["torch_rpc"])
    assert bsp["ratio"] == pytest.approx(bsp["peers"]["ddp"] / bsp["paceline"])
    assert asp["unlocked"] > 0
    assert bsp["unlocked"] is None
    for row in (asp, bsp):
        assert row["shared_floats"] == pytest.approx(4, abs=0.1), "workers + 2"
    printed = " ".join(capsys.readouterr().out.split())
    assert "torch RPC at 3e+04 without a lock, mixing versions: " in printed


@pytest.mark.usefixtures("compared")
def test_the_exchange_over_tcp(tmp_path, capsys) -> None:
    path = tmp_path / "out.json"
    small = ["--params", "30000", "--workers", "2", "--rounds", "1"]
    assert cli.run(["bench", "exchange", "--transport", "tcp", *small, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["wire"], row["keys"]) for row in rows] == [("float32", False), ("float32", True), ("bfloat16", False)]
    for row in rows:
        assert (row["mode"], row["params"], row["workers"], row["transport"]) == ("asp", 30000, 2, "tcp")
        assert row["unit"] == "pushes/s"
        assert set(row["peers"]) == {"torch_rpc"}
        assert row["ratio"] == pytest.approx(row["paceline"] / row["peers"]["torch_rpc"])
        assert row["paceline"] > 0
        assert row["floor"] > 0
    assert rows[2]["floor"] == pytest.approx(2 * rows[0]["floor"])
    printed = capsys.readouterr().out
    assert "torch_rpc" in printed
    assert "keys at 3e+04: " in printed


def test_the_loopback_carries_something() -> None:
    assert 1e7 < loopback_bandwidth(1 << 22) < 1e12


def test_an_unknown_transport_gets_one_line(capsys) -> None:
    assert cli.run(["bench", "exchange", "--transport", "udp"]) == 2
    assert "udp" in capsys.readouterr().err
