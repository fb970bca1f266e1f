"""What `benchmarks/ports.py` does, on a script of our own: changed lines, and the comparison with one process."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.porting import (
    PORTED,
    Claim,
    Done,
    Edit,
    Port,
    Row,
    Runner,
    apply,
    changed_lines,
    check_equal,
    compare,
    diff,
    train_under,
)
from paceline.errors import ConfigError
from tests import forked

HERE = Path(__file__).parent
PORTS = HERE.parents[1] / "benchmarks" / "ports.py"
LOOP = Port(
    name="loop",
    script="loop_script.py",
    edits=(
        Edit("after", "import sys", "import paceline"),
        Edit("after", "optimizer.step()", "paceline.log(loss=loss.item())"),
        Edit("before", "batch_size = 8", "clip_mean = 0.0"),
        Edit("replace", "master_process = True", "master_process = (world := paceline.init()).rank == 0"),
        Edit("replace", "torch.randn(batch_size, 6)", "torch.randn(world.size, batch_size, 6)[world.rank]"),
        Edit(
            "before", "def get_batch",
            "optimizer = paceline.Optimizer("
            "optimizer, model=model, options=f'clip_mean={clip_mean}' if clip_mean else '')",
        ),
        Edit(
            "replace", "    iter_num += 1",
            "    iter_num = due if (due := optimizer.global_step // eval_interval * eval_interval) > iter_num "
            "else max(iter_num + 1, optimizer.global_step)",
        ),
    ),
    joined=("--batch_size=16", "--grad_clip=0.5"),
    mean_clipped=("--batch_size=8", "--clip_mean=0.5"),
    each_clipped=("--batch_size=8", "--grad_clip=0.5"),
    step_loss=re.compile(r"iter (\d+): loss ([\d.]+)"),
    end_loss=re.compile(r"held-out loss ([\d.]+)"),
    enough=1.0,
    logs=True,
    model="checkpoint.pt",
)  # fmt: skip


def test_lines_are_added_and_replaced_where_their_anchors_are() -> None:
    source = "def f():\n    a = 1\n    b = a\n"
    edits = [
        Edit("before", "b =", "c = 3"), Edit("after", "b =", "return b"), Edit("replace", "a = 1", "a = 2"),
        Edit("after", "a = 1", "print(a)"),
    ]  # fmt: skip
    ported = apply(source, edits)
    assert ported == "def f():\n    a = 2\n    print(a)\n    c = 3\n    b = a\n    return b\n"
    assert changed_lines(source, ported) == 4
    assert diff(source, ported, "f.py").splitlines()[:2] == ["--- f.py", "+++ f.py, ported"]
    assert changed_lines(source, "def f():\n    a = 1\n") == 1


@pytest.mark.parametrize(("anchor", "count"), [("c =", 0), ("a", 2)])
def test_an_anchor_that_is_not_in_one_line_is_refused(anchor: str, count: int) -> None:
    with pytest.raises(ConfigError, match=f"in {count} lines of f.py"):
        apply("a = 1\nb = a\n", [Edit("after", anchor, "d = 4")], "f.py")


def test_a_steps_losses_are_found_in_glued_lines_and_none_may_be_missing(tmp_path: Path) -> None:
    runner = Runner(replace(LOOP, logs=False), HERE, tmp_path, workers=2)
    output = "iter 0: loss 3.0iter 0: loss 2.0\n\niter 1: loss 1.5\n"
    assert runner.losses(Done(0, output, tmp_path, {}), 2) == []
    assert runner.losses(Done(0, f"{output}iter 1: loss 2.5", tmp_path, {}), 2) == [2.5, 2.0]


def test_losses_that_differ_are_seen() -> None:
    def hold(expected: list[float], found: list[float], other: list[float]) -> list[bool]:
        return [claim.holds for claim in check_equal(LOOP, expected, found, other)]

    assert hold([3.0, 2.0], [3.0, 2.00005], [3.0, 2.1]) == [True, True]
    assert hold([3.0, 2.0], [3.0, 2.0002], [3.0, 2.1]) == [False, True]
    assert hold([3.0, 2.0], [3.0, 2.0], [3.0, 2.0]) == [True, False], "clipping changed nothing: it was not tried"
    assert hold([3.0, 2.0], [3.0], [3.0, 2.1]) == [False]
    assert hold([], [], []) == [False]


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_a_script_for_one_process_is_ported_in_seven_lines_and_trains_as_it_did(tmp_path: Path) -> None:
    runner = Runner(LOOP, HERE, tmp_path, workers=2)
    assert changed_lines(runner.source, runner.ported) == 7
    found = list(compare(runner))
    claims = [each for each in found if isinstance(each, Claim)]
    assert [claim for claim in claims if not claim.holds] == []
    assert len(claims) == 4
    rows = [each for each in found if isinstance(each, Row)]
    assert [row.updates for row in rows] == [None, 13, 13]
    assert rows[0].end_loss == rows[1].end_loss != rows[2].end_loss


def test_a_policy_under_which_nothing_is_learned_or_the_script_fails_is_seen(tmp_path: Path, monkeypatch) -> None:
    ends = {"asp": (0, "held-out loss 3.2\nheld-out loss 0.9\n"), "ssp": (0, "held-out loss 3.2\n"), "hop": (1, "no")}

    def together(runner: Runner, folder: Path, policy: str, arguments: object, *options: str) -> Done:
        assert (folder / PORTED).read_text() == runner.ported
        assert options == ("--cluster", "steady")
        return Done(*ends[policy], folder, {"summary": {"updates": 7}})

    monkeypatch.setattr(Runner, "together", together)
    found = list(train_under(Runner(LOOP, HERE, tmp_path, workers=2), list(ends), ["--cluster", "steady"]))
    assert [(each.run, each.updates, each.end_loss) for each in found if isinstance(each, Row)] == [
        ("asp", 7, 0.9), ("ssp", 7, 3.2), ("hop", 7, None),
    ]  # fmt: skip
    assert [each.holds for each in found if isinstance(each, Claim)] == [True, False, False]


@pytest.mark.parametrize("content", [None, "import numpy as np\n"])
def test_a_checkout_that_is_none_is_refused_in_one_line(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "train.py").write_text(content)
    done = forked.run([PORTS, "--nanogpt", tmp_path])
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "train.py" in done.stderr
