"""When should workers of unequal speed meet? `plan` says it; the paper's own ways to find out are here by name.

    times = zipline.generate(workers=100, iterations=15, random=np.random.default_rng(0))
    best = zipline.plan(times)                      # Plan(time=..., wait=..., iterations=(...))
    same = zipline.SEARCHES["ZipLineOptBS"](times)

`plan` (paceline.policies.zipline) is what the policies use: exact, and many times as fast as the others.
"""

from __future__ import annotations

from collections.abc import Callable

from numpy.typing import ArrayLike

from paceline.policies.zipline import Plan, plan
from paceline.zipline.generator import generate
from paceline.zipline.grids import exhaustive, full_grid_scan, grid_scan
from paceline.zipline.scans import zipline, zipline_opt, zipline_opt_bs

SEARCHES: dict[str, Callable[[ArrayLike], Plan]] = {
    "ZipLine": zipline,
    "ZipLineOpt": zipline_opt,
    "ZipLineOptBS": zipline_opt_bs,
    "FullGridScan": full_grid_scan,
    "GridScan": grid_scan,
    "exhaustive": exhaustive,
    "plan": plan,
}
"""The searches by the names of the paper's tables. GridScan and FullGridScan may miss the best; all others find it."""

__all__ = [
    "SEARCHES",
    "Plan",
    "exhaustive",
    "full_grid_scan",
    "generate",
    "grid_scan",
    "plan",
    "zipline",
    "zipline_opt",
    "zipline_opt_bs",
]
