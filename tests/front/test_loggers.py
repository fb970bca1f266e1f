"""Where logged metrics go besides: files, TensorBoard, plug-ins of others."""

from __future__ import annotations

import logging
import textwrap
from pathlib import Path

import pytest

from paceline import loggers
from paceline.errors import ConfigError
from tests import forked

LOGS = """
import paceline, torch
model = torch.nn.Linear(3, 1)
opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
for step in range(10):
    opt.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    paceline.log(val_loss=10.0 - step)
"""


def test_csv_has_a_line_for_each_value_and_goes_on_after_resume(tmp_path: Path) -> None:
    for time_s in (1.0, 2.0):
        with loggers.opened(loggers.find(["csv"]), tmp_path, {}) as kept:
            kept.log(time_s, 3, {"a": 0.5, "b": float("nan")})
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines[:3] == ["time_s,updates,metric,value", "1.000000,3,a,0.5", "1.000000,3,b,nan"]
    assert [line.split(",")[0] for line in lines[3:]] == ["2.000000"] * 2


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["csw"], r"there is no logger 'csw' \(there are: csv, "),
        (["csv", "csv"], "twice"),
        (["csv:x"], "cannot be read"),
        (["csv:a=1"], "takes no options"),
        (["tensorboard:a=1"], "takes no options"),
    ],
)
def test_what_cannot_be_is_refused(texts: list[str], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why), loggers.opened(loggers.find(texts), tmp_path, {}):
        pass


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of somebody else's, with a logger that works, one that fails and one that is not there."""
    (tmp_path / "their_loggers.py").write_text(
        textwrap.dedent("""
        taken = []
        class Good:
            def __init__(self, folder, config, options):
                taken.append((config, options))
            def log(self, time_s, updates, values):
                taken.append((time_s, updates, values))
            def close(self):
                taken.append("closed")
        class Bad(Good):
            def log(self, time_s, updates, values):
                raise RuntimeError("no network")
        """)
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    points = "".join(f"{name} = their_loggers:{name.capitalize()}\n" for name in ("good", "bad", "absent"))
    (info / "entry_points.txt").write_text(f"[{loggers.GROUP}]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_plug_in_is_found_and_one_that_fails_ends_nothing(plugin: Path, caplog: pytest.LogCaptureFixture) -> None:
    import their_loggers

    with caplog.at_level(logging.WARNING), loggers.opened(
        loggers.find(["bad", "good:project=x"]), plugin, {"seed": 1}
    ) as kept:  # fmt: skip
        kept.log(1.0, 2, {"a": 3.0})
        kept.log(2.0, 4, {"a": 5.0})
    assert their_loggers.taken[1:] == [({"seed": 1}, {"project": "x"}), (1.0, 2, {"a": 3.0}), (2.0, 4, {"a": 5.0}),
                                       "closed"]  # fmt: skip
    assert caplog.text.count("no network") == 1
    with pytest.raises(ConfigError, match="cannot be loaded"):
        loggers.find(["absent"])


@pytest.mark.ci
def test_what_a_run_logs_is_in_the_event_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "train.py").write_text(LOGS)
    command = ["-m", "paceline", "run", "--log", "tensorboard", "csv", "--dir", "run", "--workers", "2", "train.py"]
    done = forked.run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    values = [event.value for event in events.Scalars("val_loss")]
    assert sorted(values) == sorted(2 * [10.0 - step for step in range(10)])
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 21
