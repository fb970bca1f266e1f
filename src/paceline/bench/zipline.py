"""How long a plan takes, beside ZipLineOptBS, the paper's fastest search, compiled from C++ on the same machine.

Both get the same matrix of the paper's generator and give a whole plan: barrier, wait, each worker's iteration. The
compiled one (zipline_opt_bs.cpp) is called in this process. Neither uses a second thread: what counts is the processor
time the process was given, so that neighbours on the machine do not. Rounds are interleaved, medians are compared.
Both must agree, or there is no result.
"""

from __future__ import annotations

import ctypes
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path

import numpy as np

from paceline.bench.rounds import in_turn, milliseconds
from paceline.errors import PacelineError
from paceline.zipline import Plan, generate, plan

COMPILERS = ("g++", "c++", "clang++")
OPTIONS = ("-std=c++11", "-O2", "-shared", "-fPIC")
PAPER_MS = {(10, 15): 0.124, (10, 150): 1.15, (100, 15): 2.65, (100, 150): 23.0, (1000, 15): 76.8, (1000, 150): 566.0}
"""The milliseconds of ZipLineOptBS in the paper's Table 4."""
SOURCE = "zipline_opt_bs.cpp"

Search = Callable[[np.ndarray], Plan]


@dataclass(frozen=True)
class Row:
    """One size: milliseconds a plan takes. Without a compiler there is nothing to compare with."""

    workers: int
    iterations: int
    plan_ms: float
    opt_bs_ms: float | None
    ratio: float | None
    paper_opt_bs_ms: float | None


def run(workers: list[int], iterations: int, rounds: int, seed: int, say: Callable[[str], None]) -> list[Row]:
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        searches: dict[str, Search] = {"plan": plan}
        compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
        if compiler is None:
            say(
                f"no C++ compiler ({', '.join(COMPILERS)}), so ZipLineOptBS is not measured: install one, "
                "such as with `apt install g++`"
            )
        else:
            searches["opt_bs"] = compiled(compiler, Path(folder))
        rows = []
        for count in workers:
            rows.append(measure(searches, generate(count, iterations, random), rounds))
            say(f"{count} workers, {iterations} iterations: {rows[-1].plan_ms:.2f} ms a plan")
        return rows


def measure(searches: dict[str, Search], times: np.ndarray, rounds: int) -> Row:
    found = {search(times) for search in searches.values()}
    if len(found) != 1:
        waits = ", ".join(f"{each.wait:g} at {each.time:g}" for each in found)
        raise PacelineError(f"plan and ZipLineOptBS differ for {len(times)} workers: a wait of {waits}")
    ways = {name: partial(milliseconds, partial(search, times)) for name, search in searches.items()}
    medians = {name: statistics.median(all_ms) for name, all_ms in in_turn(ways, rounds).items()}
    size = (times.shape[0], times.shape[1])
    opt_bs_ms = medians.get("opt_bs")
    ratio = None if opt_bs_ms is None else opt_bs_ms / medians["plan"]
    return Row(*size, medians["plan"], opt_bs_ms, ratio, PAPER_MS.get(size))


def compiled(compiler: str, folder: Path) -> Search:
    """Compiles ZipLineOptBS from its source."""
    source, library = folder / SOURCE, folder / "opt_bs.so"
    source.write_text(files("paceline.bench").joinpath(SOURCE).read_text())
    done = subprocess.run(
        [compiler, *OPTIONS, str(source), "-o", str(library)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        complaint = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise PacelineError(f"{compiler} cannot compile {SOURCE}: {complaint}")
    opt_bs = ctypes.CDLL(str(library)).zipline_opt_bs
    opt_bs.restype = None

    def search(times: np.ndarray) -> Plan:
        matrix = np.ascontiguousarray(times, dtype=np.float64)
        workers, iterations = matrix.shape
        barrier, wait, stops = ctypes.c_double(), ctypes.c_double(), np.empty(workers, dtype=np.intc)
        opt_bs(
            matrix.ctypes.data_as(ctypes.c_void_p), workers, iterations, ctypes.byref(barrier), ctypes.byref(wait),
            stops.ctypes.data_as(ctypes.c_void_p),
        )  # fmt: skip
        return Plan(barrier.value, wait.value, tuple(stops.tolist()))

    return search
