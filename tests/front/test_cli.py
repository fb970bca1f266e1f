"""The command line: results, one-line errors, exit codes, nothing half-written."""

from __future__ import annotations

import importlib
import json
import resource
import subprocess
import sys

import pytest

import paceline
from paceline import cli
from paceline.commands.live_table import LiveTable

BAD = [
    ("compare sps", "unknown policy 'sps', did you mean 'ssp'?"),
    ("compare bsp ssp:stale=2", "ssp has no parameter 'stale' (it has: staleness, lazy"),
    ("compare", "name at least one policy"),
    ("simulate --policy ssp:staleness=-1", "ssp:staleness=-1 is out of range: 0 or more"),
    ("simulate --policy ssp:staleness=many", "ssp:staleness=many is not a whole number (0 or more)"),
    ("simulate --policy ssp:staleness", "'staleness' in 'ssp:staleness' is not KEY=VALUE"),
    ("simulate --policy backup:extra=8", "backup:extra=8 needs more than 8 workers: with 8, extra may be from 0 to 7"),
    ("simulate --workers 0", "workers=0 is out of range: 1 or more"),
    ("simulate --servers 0", "servers=0 is out of range: 1 or more"),
    ("simulate --workers many", "--workers"),
    ("simulate --wrkers 3", "perhaps you meant --workers"),
    ("run --worker 3 train.py", "there is no option --worker, perhaps you meant --workers (see paceline run --help)"),
    ("simulate --worker=3 --seed 1", "there is no option --worker, perhaps you meant --workers (see"),
    ("simulate --zzz", "there is no option --zzz (see paceline simulate --help)"),
    ("simulate --workload digits", "unknown workload 'digits', did you mean 'digits-mlp'?"),
    ("simulate --cluster nowhere.toml", "cannot read the scenario 'nowhere.toml': No such file"),
    ("simulate --cluster slow", "unknown cluster 'slow'"),
    ("simulate --cluster one-slow:worker=9", "workers are 0 to 7"),
    ("simulate --target f1=0.5", "unknown target 'f1=0.5'"),
    ("simulate --target accuracy=2", "accuracy is from 0 to 1"),
    ("simulate --target accuracy", "unknown target 'accuracy'"),
    ("simulate --workload quadratic --target accuracy=0.5", "one of loss"),
    ("simulate --optimizer sgd:lr=-1", "Invalid learning rate"),
    ("simulate --optimizer lbfgs", "lbfgs cannot run on the servers: it needs several gradients"),
    ("simulate --iterations 0", "iterations=0 is out of range: 1 or more"),
    ("simulate --seed -1", "seed=-1 is out of range: 0 or more"),
    ("simulate --report no/such/folder/x.html", "does not exist or cannot be written"),
    ("simulate --policy specsync:base=bsp", "specsync:base=bsp cannot be speculated on: name one policy that applies"),
    ("simulate --policy specsync:abort_time=1", "specsync takes abort_time and abort_rate together, or neither"),
    ("tune", "tune what? nothing was named: only specsync has a grid to try"),
    ("tune asp --target accuracy=0.9", "tune what? asp: only specsync has a grid to try"),
    ("tune specsync", "tune compares times to a target: name one"),
    ("tune specsync:abort_time=1,abort_rate=0.1 --target accuracy=0.9", "is fixed already"),
    ("run", "name a script"),
    ("run nothing.py", "there is no script 'nothing.py'"),
    ("run --policy bspp nothing.py", "nothing.py"),
    ("frobnicate", "frobnicate"),
]


@pytest.mark.parametrize(("line", "said"), BAD)
def test_bad_input_gets_one_clear_line_and_exit_code_2(line: str, said: str, capsys, tmp_path) -> None:
    kept = tmp_path / "out.json"
    arguments = line.split()
    if arguments[0] in ("compare", "simulate"):
        arguments += ["--json", str(kept)]
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert out == ""
    assert not list(tmp_path.iterdir()), "nothing half-written"


def test_compare_writes_table_json_report_and_timeline(capsys, tmp_path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html", "trace")}
    line = (
        "compare bsp ssp:staleness=3 backup:extra=1 asp --workload digits-mlp --cluster random-slowdown:factor=6 "
        "--workers 4 --servers 2 --target accuracy=0.7 --seed 0 "
        f"--json {files['json']} --report {files['html']} --chrome {files['trace']}"
    )
    assert cli.run(line.split()) == 0
    out = capsys.readouterr().out
    assert "speed-up" in out
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("wrote"))
    result = json.loads(files["json"].read_text())
    assert [run["policy"] for run in result["runs"]] == ["bsp", "ssp:staleness=3", "backup:extra=1", "asp"]
    assert all(run["time_to_target_s"] > 0 for run in result["runs"])
    assert result["config"]["cluster"].startswith("random-slowdown:")
    assert "<svg" in files["html"].read_text()
    assert json.loads(files["trace"].read_text())["traceEvents"]


def test_a_missed_target_is_a_result_not_an_error(capsys, tmp_path) -> None:
    path = tmp_path / "out.json"
    line = "simulate --policy asp --workers 2 --iterations 3 --target accuracy=0.99 --json"
    assert cli.run([*line.split(), str(path)]) == 0
    assert json.loads(path.read_text())["runs"][0]["time_to_target_s"] is None
    assert "missed accuracy=0.99" in capsys.readouterr().out


def test_policies_and_doctor(capsys) -> None:
    assert cli.run(["policies"]) == 0
    out = capsys.readouterr().out
    for word in (
        "bsp",
        "asp",
        "ssp",
        "backup",
        "staleness=3",
        "0 or more",
        "workers or none:",
        "Chen et al. 2016, Alg. 3-4",
    ):
        assert word in out
    assert cli.run(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("torch", "msgspec", "shared memory", "digits data"):
        assert word in out


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_teaches(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.run([*command.split(), "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for word in ("None", "False", "--no-"):
        assert word not in out, "what holds if nothing is said is said in words"
    if command in ("compare", "simulate", "run"):
        assert f"paceline {command}" in out
        assert "ssp:staleness=3" in out


@pytest.mark.parametrize(
    ("arguments", "own", "script"),
    [
        (["run", "--workers", "2", "a.py", "--workers", "9"], ["run", "--workers", "2"], ["a.py", "--workers", "9"]),
        (["run", "--", "train", "-x"], ["run"], ["train", "-x"]),
        (["run", "--policy", "./mine.py:Mine", "a.py"], ["run", "--policy", "./mine.py:Mine"], ["a.py"]),
        (["simulate", "--json", "a.py"], ["simulate", "--json", "a.py"], []),
    ],
)
def test_what_stands_after_the_script_is_the_scripts(arguments, own, script) -> None:
    assert cli.split_script(arguments) == (own, script)


def test_brackets_in_what_a_worker_prints_are_only_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    """They are markup to rich: a closing one without an opening one would end the run."""
    with LiveTable("asp", None) as table:
        table.say("saved to [/tmp/model] :smile: [info]")
    assert capsys.readouterr().out == "saved to [/tmp/model] :smile: [info]\n"


def test_tune_tries_the_grid_beside_the_base_and_what_tunes_itself(capsys, tmp_path) -> None:
    file = tmp_path / "tune.json"
    line = "tune specsync --workload quadratic --workers 4 --cluster lognormal:sigma=0.3 --target loss=0.5"
    assert cli.run([*line.split(), "--rates", "0.1", "0.4", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    data = json.loads(file.read_text())
    assert len(data["rows"]) == 2 + 5 * 2
    assert [row["policy"] for row in data["rows"][:2]] == ["asp", "specsync:base=asp"]
    times = {float(row["tried"].split()[0]) for row in data["rows"][2:]}
    assert max(times) == pytest.approx(0.05, rel=0.2), "half of the mean span of an iteration"
    reached = [row for row in data["rows"] if row["time_to_target_s"] is not None]
    assert data["best"] == min(reached, key=lambda row: row["time_to_target_s"])["policy"]
    assert f"best: {data['best']}" in out
    assert max(row["aborted_share"] for row in data["rows"]) > 0.2


def test_bench_tuner_measures_both_forms(capsys, tmp_path) -> None:
    file = tmp_path / "tuner.json"
    assert cli.run(["bench", "tuner", "--workers", "20", "150", "--rounds", "3", "--json", str(file)]) == 0
    small, large = json.loads(file.read_text())["rows"]
    assert small["paper_form_ms"] > small["tune_ms"] > 0
    assert large["paper_form_ms"] is None
    assert "\n-: the paper's form takes too long with more than 100 workers\n" in capsys.readouterr().out


def test_tune_explains_its_dashes(capsys) -> None:
    line = "tune specsync --workload quadratic --workers 2 --target loss=1e-9 --iterations 3 --times 0.01 --rates 0.1"
    assert cli.run(line.split()) == 0
    assert "\n-: it or the base did not reach loss=1e-9\n" in capsys.readouterr().out


def test_help_names_every_command_in_its_group_and_imports_nothing_heavy() -> None:
    program = (
        "import sys; from paceline import cli; code = cli.run(['--help']);"
        "sys.exit(code or ', '.join({'torch', 'numpy', 'tyro', 'rich'} & sys.modules.keys()) or 0)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    groups = [line for line in shown.stdout.splitlines() if line.endswith(":")]
    assert groups == ["train:", "explore:", "measure:"]
    listed = [line[2:].split("  ")[0].strip() for line in shown.stdout.splitlines() if line.startswith("  ")]
    assert listed == list(cli.COMMANDS)


def processor_s(*arguments: str) -> float:
    """The processor time of a process that runs `paceline` with these arguments."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "paceline", *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_takes_less_than_a_second() -> None:
    assert processor_s("--help") < 1


@pytest.mark.ci
@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_help_of_a_command_takes_less_than_three_seconds(command: str) -> None:
    assert processor_s(*command.split(), "--help") < 3


def test_every_command_in_the_table_is_there() -> None:
    for command in cli.COMMANDS.values():
        found = getattr(importlib.import_module(f"paceline.commands.{command.module}"), command.cls)
        assert callable(found.main)


def test_every_public_name_is_imported_when_it_is_used() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        paceline.nothing  # noqa: B018
