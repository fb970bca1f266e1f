"""The pieces of `fluentps-overlap`; the whole takes a quarter of a minute and is for `paceline reproduce`."""

from __future__ import annotations

import pytest

from paceline.reproductions import fluentps_overlap
from paceline.reproductions.fluentps_overlap import LATENCY_S, Setting, claims, measure, resnet56
from paceline.tensors.layout import Layout


def test_the_model_is_resnet_56() -> None:
    entries = resnet56()
    assert sum(entry.numel for entry in entries) == 853_018
    assert sum(len(entry.shape) != 1 for entry in entries) == 56
    assert len({entry.name for entry in entries}) == len(entries) == 167


def test_a_free_scheduler_costs_its_three_messages_when_there_is_nothing_to_overlap() -> None:
    """One worker and one server: push, then pull, whoever decides. The pull queues behind the push otherwise."""
    setting = Setting(workers=1, gbit_per_s=1.0, servers=1)
    apart = setting.iteration_s("scheduled", "eps") - setting.iteration_s("bsp", "eps")
    assert apart == pytest.approx(3 * LATENCY_S, rel=0.2)


def test_rows_and_claims_have_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fluentps_overlap, "ITERATIONS", 3)
    rows = [row for workers in (4, 8) for row in measure(Setting(workers, 1.0))]
    assert all(row["ps_lite_s"] > row["overlap_s"] > row["overlap_eps_s"] > row["compute_s"] for row in rows)
    made = claims(rows, {1.0: 0.01}, 0.0)
    # So few workers have little to overlap: the gains are in the right direction, and below what the claims ask for.
    assert [claim.holds for claim in made] == [True, False, False, False, True]
    assert not claims(rows, {1.0: 0.01}, 0.1)[-1].holds


def test_key_ranges_are_as_unequal_as_the_essay_says() -> None:
    sizes = Layout(resnet56(), "float32", slicing="key-range").slice_bytes(8)
    assert max(sizes) * 8 / sum(sizes) == pytest.approx(2.43, abs=0.01)
