"""Live runs whose script, not the command, says that there are no servers; and graphs that are in files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.cluster import Cluster, Edge, Fault, Resize, load
from paceline.core.messages import Members
from paceline.errors import ConfigError
from paceline.session import world


def script(policy: str, steps: int = 3) -> Callable[[], None]:
    def work() -> None:
        paceline.init()
        model = nn.Linear(3, 1)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy=policy, model=model)
        for _ in range(steps):
            opt.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            opt.step()

    return work


def scenario(**more: object) -> Cluster:
    return replace(load("steady:compute_s=0.001"), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["hop:graph=ring", "adpsgd:graph=ring"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cluster": scenario(faults=(Fault("join", 5, at_s=0.01),))}, "join of worker 5: the graph has places 0 to 2"),
        ({"cluster": scenario(edges=(Edge((0, 1), latency_s=0.1),))}, "are for virtual time: live peers share one"),
        ({"cluster": scenario(machines=(2, 1))}, "are for virtual time: live peers share one"),
        ({"cluster": scenario(resizes=(Resize(2, at_s=0.1),))}, r"\[\[servers\]\] in the scenario"),
        ({"servers": 2}, "servers=2: .* has no servers, leave it out"),
        ({"slicing": "key-range"}, "no servers to cut the parameters for"),
    ],
)
def test_what_the_scripts_policy_cannot_have_is_refused(policy: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        paceline.launch(script(policy), workers=3, timeout_s=30, **options)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_without_a_number_of_servers_the_scripts_policy_needs_none() -> None:
    run = paceline.launch(script("hop:graph=ring"), workers=3, timeout_s=30)
    assert run.trace.header.members == Members(3, 0)


@pytest.mark.parametrize("by_script", [True, False])
def test_forced_weights_come_with_a_warning(by_script: bool, capfd: pytest.CaptureFixture[str]) -> None:
    policy = "hop:graph=hierarchical,machines=2:1,weights=uniform"
    work = script(policy if by_script else "bsp")
    paceline.launch(work, workers=3, policy=None if by_script else policy, timeout_s=30)
    said = capfd.readouterr().out
    assert said.count("warning: hop:graph=hierarchical") == 1
    assert "weights are not doubly stochastic, peers count for" in said


@pytest.mark.parametrize("by_script", [True, False])
def test_a_graph_file_is_found_whatever_folder_the_script_goes_to(
    by_script: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "three.edges").write_text("0 1\n1 2\n2 0\n")
    monkeypatch.chdir(tmp_path)
    policy = "hop:graph=three.edges"

    def work() -> None:
        if by_script:  # it is the script's folder when the policy is said
            script(policy)()
            return
        elsewhere = tmp_path / str(paceline.init().rank)
        elsewhere.mkdir()
        os.chdir(elsewhere)
        script("bsp")()
        assert world().rank == int(elsewhere.name)

    run = paceline.launch(work, workers=3, policy=None if by_script else policy, timeout_s=30)
    assert run.failures == []
    assert run.policy == f"hop:graph={tmp_path / 'three.edges'}"
    monkeypatch.chdir("/")
    assert run.replay() == []
    view = run.view().peers
    assert view is not None
    assert view.bound == 2
    (tmp_path / "three.edges").unlink()
    without = run.view().peers
    assert without is not None
    assert without.bound is None


@pytest.mark.parametrize("policy", ["hop", "adpsgd"])
def test_whoever_joins_gets_the_graph_that_the_run_began_with(policy: str, tmp_path: Path) -> None:
    """The file is gone by then, as it is on other machines from the start."""
    path = tmp_path / "ring.edges"
    path.write_text("0 1\n1 0\n1 2\n2 1\n2 0\n0 2\n")

    def work() -> None:
        rank = paceline.init().rank
        model = nn.Linear(3, 1)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        while opt.global_step < 40:
            opt.step()
            if rank == 0:
                path.unlink(missing_ok=True)

    restart = Fault("restart", 1, at_iteration=10, for_s=0.05)
    cluster = replace(load("steady:compute_s=0.01"), faults=(restart,))
    run = paceline.launch(work, workers=3, policy=f"{policy}:graph={path}", cluster=cluster, timeout_s=30)
    assert run.failures == []
    assert not path.exists()
    assert {record.incarnation for record in run.trace if record.node == ("peer", 1)} == {0, 1}
