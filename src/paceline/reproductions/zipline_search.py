"""zipline-search: who finds the best moment to meet, and how long does it take?

Zhao et al. 2021, 6.1, Tables 3 and 4.

The paper. For n workers and R predicted iterations of each, generated as section 6.1 says, Table 3 has the shortest
wait that each search finds, Table 4 what it takes. ZipLine, ZipLineOpt, ZipLineOptBS and FullGridScan always find the
same; GridScan does in three of ten sizes. ZipLine is one or two orders faster than FullGridScan, ZipLineOpt faster than
ZipLine, ZipLineOptBS faster still from some hundred workers on.

Here. The same sizes, ten matrices of each where the paper has one, all searches on each, beside `plan`, which is ours
(paceline/policies/zipline.py). A search is right if its wait is the best one; what is best, `plan` says, which the
tests hold against a search through every choice.

What differs. The paper's programs are C++, these are Python, written to be read: where one of them loops and another
calls a built-in, that tells on the ratio. `paceline bench zipline` has ZipLineOptBS compiled. How long the generator
lets workers run before the prediction is not in the paper (zipline/generator.py). The waits are given by the seed, to
the byte; the times are those of this machine: processor time, the median of the matrices.

ZipLine is Algorithm 2 as printed, and that must be faster than the ZipLine of the paper's experiments. It takes the
oldest out of its window and has the next candidate when that worker comes again: about a thousand candidates at
n = 1000, R = 15, where Figure 7 counts 13 795, one for each time from the first full window on.

FullGridScan looks at (R n)^2 times. It gets one matrix at n = 500, R = 150, and is left out at n = 1000, R = 150,
where the paper's took 207 s.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from paceline.reproductions.base import Claim, Findings, Reproduction, Row, Say
from paceline.zipline import SEARCHES, generate

Size = tuple[int, int]
"""The size of a matrix: (workers, predicted iterations of each)."""

EXACT = ("ZipLine", "ZipLineOpt", "ZipLineOptBS")
COMPARED = (*EXACT, "FullGridScan", "GridScan", "plan")
WORKERS = (10, 50, 100, 500, 1000)
LOOKAHEADS = (15, 150)
MATRICES = 10
FULL_SCAN_ONCE, FULL_SCAN_NEVER = 20_000, 100_000
"""With so many times the full scan is tried once, or not at all."""

# fmt: off
TABLE_3: dict[Size, tuple[int, int]] = {
    (10, 15): (599, 599), (50, 15): (1103, 1103), (100, 15): (1228, 1345), (500, 15): (1351, 1357),
    (1000, 15): (1403, 1405), (10, 150): (518, 518), (50, 150): (1055, 1103), (100, 150): (1175, 1253),
    (500, 150): (1307, 1344), (1000, 150): (1382, 1401),
}
"""The paper's best wait in ms, and GridScan's."""
TIMED: tuple[Size, ...] = ((10, 15), (10, 150), (100, 15), (100, 150), (1000, 15), (1000, 150))
TABLE_4: dict[str, tuple[float, ...]] = {
    "ZipLine": (1.49e2, 1.32e3, 6.37e3, 4.99e4, 2.53e5, 2.38e6),
    "ZipLineOpt": (0.90e2, 8.08e2, 2.46e3, 1.93e4, 9.39e4, 7.78e5),
    "ZipLineOptBS": (1.24e2, 1.15e3, 2.65e3, 2.30e4, 7.68e4, 5.66e5),
    "FullGridScan": (1.54e3, 4.67e4, 8.13e4, 2.15e6, 4.04e6, 2.07e8),
    "GridScan": (1.68e2, 5.50e3, 1.11e3, 4.38e4, 7.45e3, 2.57e5),
}
"""The paper's microseconds, by the sizes above."""
# fmt: on


@dataclass
class Tried:
    """What one search found and took, for the matrices of one size."""

    waits: list[float]
    right: int
    us: float


Results = dict[Size, dict[str, Tried]]


@dataclass(frozen=True)
class ZipLineSearch(Reproduction, name="zipline-search", paper="Zhao et al. 2021, Tables 3 and 4"):
    """ZipLine always finds the best moment to meet, one or two orders faster than a full scan; GridScan rarely does."""

    workers: tuple[int, ...] = WORKERS
    lookaheads: tuple[int, ...] = LOOKAHEADS
    matrices: int = MATRICES

    @property
    def steps(self) -> int:
        return len(self.workers) * len(self.lookaheads)

    def measure(self, seed: int, say: Say) -> Findings:
        random = np.random.default_rng(seed)
        results: Results = {}
        for iterations in self.lookaheads:
            for workers in self.workers:
                size = (workers, iterations)
                results[size] = try_all([generate(*size, random) for _ in range(self.matrices)])
                wait, grid = fmean(results[size]["plan"].waits), score([results[size]["GridScan"]])
                say(f"n = {workers}, R = {iterations}: a wait of {wait:.0f} ms, GridScan right in {grid}")
        rows = [table_3(size, tried) for size, tried in results.items()]
        return Findings([*rows, *table_4(results)], [*claims_of_waits(results), *claims_of_times(results)])


def try_all(matrices: list[np.ndarray]) -> dict[str, Tried]:
    """Tries every search on these matrices of one size."""
    best = [SEARCHES["plan"](matrix).wait for matrix in matrices]
    tried = {}
    for name in COMPARED:
        some = matrices
        if name == "FullGridScan" and matrices[0].size >= FULL_SCAN_ONCE:
            some = matrices[:1] if matrices[0].size < FULL_SCAN_NEVER else []
        waits, took = [], []
        for matrix in some:
            began = time.process_time()
            waits.append(SEARCHES[name](matrix).wait)
            took.append(1e6 * (time.process_time() - began))
        if some:
            right = sum(wait == least for wait, least in zip(waits, best, strict=False))
            tried[name] = Tried(waits, right, median(took))
    return tried


def table_3(size: Size, tried: dict[str, Tried]) -> Row:
    paper = TABLE_3.get(size, (None, None))
    ziplines = [tried[name] for name in EXACT]
    return {
        "R": size[1], "n": size[0], "paper_ms": paper[0], "ours_ms": fmean(tried["plan"].waits),
        "ZipLines_right": score(ziplines),
        "FullGridScan_right": score([tried["FullGridScan"]]) if "FullGridScan" in tried else None,
        "paper_GridScan_ms": paper[1], "GridScan_ms": fmean(tried["GridScan"].waits),
        "GridScan_right": score([tried["GridScan"]]),
    }  # fmt: skip


def score(tried: list[Tried]) -> str:
    return f"{sum(each.right for each in tried)} of {sum(len(each.waits) for each in tried)}"


def table_4(results: Results) -> list[Row]:
    """Makes a table of microseconds: the paper's line above ours, a column for each size."""
    sizes = [size for size in TIMED if size in results]
    rows: list[Row] = []
    for name in COMPARED:
        if name in TABLE_4:
            paper = dict(zip(TIMED, TABLE_4[name], strict=True))
            rows.append({"us_at_n_x_R": name, "whose": "paper", **{column(size): paper[size] for size in sizes}})
        ours = {column(size): results[size][name].us if name in results[size] else None for size in sizes}
        rows.append({"us_at_n_x_R": name, "whose": "ours", **ours})
    return rows


def column(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def claims_of_waits(results: Results) -> list[Claim]:
    def tried(*names: str) -> list[Tried]:
        return [each[name] for each in results.values() for name in names if name in each]

    def always(each: list[Tried]) -> bool:
        return all(one.right == len(one.waits) for one in each)

    exact, full, grid = tried(*EXACT), tried("FullGridScan"), tried("GridScan")
    share = sum(each.right for each in grid) / sum(len(each.waits) for each in grid)
    above = max(fmean(each["GridScan"].waits) / fmean(each["plan"].waits) - 1 for each in results.values())
    ours = {size: fmean(each["plan"].waits) for size, each in results.items()}
    paper = {size: float(wait) for size, (wait, _) in TABLE_3.items() if size in results}
    grows = all(ours[few] < ours[many] for few in ours for many in ours if few[0] < many[0] and few[1] == many[1])
    return [
        Claim(
            "ZipLine, ZipLineOpt and ZipLineOptBS always find the best", "100 %", score(exact), always(exact),
        ),
        Claim(
            "FullGridScan, which looks around every time, always does too", "100 %", score(full), always(full),
            "but it need not, see zipline/grids.py" if always(full) else "a heuristic too: see zipline/grids.py",
        ),
        Claim(
            "GridScan, which looks around one worker's times, mostly does not", "30 % right, at most 9.5 % above",
            f"{100 * share:.0f} % right, in the mean of a size at most {100 * above:.1f} % above", share < 0.5,
        ),
        Claim("The more workers, the longer the shortest wait", listed(paper), listed(ours), grows),
    ]  # fmt: skip


def listed(waits: dict[Size, float]) -> str:
    """Lists waits by R, and then by n."""
    by_r = {ahead: [f"{wait:.0f}" for (_, also), wait in waits.items() if also == ahead] for _, ahead in waits}
    return "; ".join(f"{', '.join(each)} ms (R = {ahead})" for ahead, each in by_r.items())


def claims_of_times(results: Results) -> list[Claim]:
    timed = [size for size in TIMED if size in results]
    scanned = [size for size in timed if "FullGridScan" in results[size]]
    many, few = [size for size in timed if size[0] >= 1000], [size for size in timed if size[0] < 1000]
    made = []
    for claim, faster, slower, sizes, remark in (
        (
            "ZipLine is one or two orders faster than FullGridScan", "ZipLine", "FullGridScan", scanned,
            "by less: numpy does FullGridScan's inner loops",
        ),
        (
            "ZipLineOpt is faster than ZipLine", "ZipLineOpt", "ZipLine", timed,
            "Algorithm 2 as printed looks at a candidate only where ZipLineOpt would, and need not search for a worker",
        ),
        ("ZipLineOptBS is faster than ZipLineOpt with many workers", "ZipLineOptBS", "ZipLineOpt", many, ""),
        (
            "... and slower with few", "ZipLineOpt", "ZipLineOptBS", few,
            "in Python a binary search is built in, looking from the front is a loop",
        ),
    ):  # fmt: skip
        places = [TIMED.index(size) for size in sizes]
        paper = [TABLE_4[slower][place] / TABLE_4[faster][place] for place in places]
        ours = [results[size][slower].us / results[size][faster].us for size in sizes]
        holds = all(ratio > 1 for ratio in ours)
        said = remark if min(ours, default=0) < min(paper, default=0) else ""
        made.append(Claim(claim, times_as_fast(paper, sizes), times_as_fast(ours, sizes), holds, said))
    return made


def times_as_fast(ratios: list[float], sizes: list[Size]) -> str:
    each = (f"{ratio:.2g}x at {column(size)}" for ratio, size in zip(ratios, sizes, strict=True))
    return ", ".join(each) or "not measured"
