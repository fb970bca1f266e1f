"""`paceline bench gradients`: what it prints and writes, and that batching is worth it."""

from __future__ import annotations

import json

from paceline import cli


def test_batched_gradients_beat_the_plain_loop(tmp_path, capsys) -> None:
    """Eight times is what a quiet machine shows; tests run on busy ones, so half of it."""
    path = tmp_path / "out.json"
    assert cli.run(["bench", "gradients", "--workload", "digits-mlp", "--rounds", "5", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["workload"] == "digits-mlp"
    assert row["workers"] == 100
    assert row["ratio"] > 4
    assert "one by one" in capsys.readouterr().out


def test_wrong_input_gets_one_line(capsys) -> None:
    assert cli.run(["bench", "gradients", "--workload", "digit-mlp"]) == 2
    assert "did you mean 'digits-mlp'?" in capsys.readouterr().err
    assert cli.run(["bench", "gradients", "--workers", "0"]) == 2
    assert "workers=0 is out of range: 1 or more" in capsys.readouterr().err
