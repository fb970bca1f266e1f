"""Staleness shard by shard; in a run by layer a shard is a layer, as in Table 1 of Chen et al. 2016."""

from __future__ import annotations

import math
from collections import Counter

from paceline.core.actions import Apply
from paceline.core.trace import Trace
from paceline.report.metrics import describe


def staleness_by_shard(trace: Trace) -> dict[int, dict[str, float]]:
    """Returns min, mean, median, max, deviation and count of the gradients each shard has applied."""
    counts: dict[int, Counter[int]] = {}
    for record in trace:
        for action in record.actions:
            if isinstance(action, Apply):
                mine = counts.setdefault(record.node.rank, Counter())
                mine.update(action.staleness(handle) for handle in action.handles)
    return {shard: {**describe(mine), **_spread(mine)} for shard, mine in sorted(counts.items())}


def _spread(counts: Counter[int]) -> dict[str, float]:
    total = counts.total()
    mean = sum(value * count for value, count in counts.items()) / total
    variance = sum(count * (value - mean) ** 2 for value, count in counts.items()) / total
    return {"deviation": math.sqrt(variance), "count": total}
