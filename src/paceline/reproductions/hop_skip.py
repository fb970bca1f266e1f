"""hop-skip: a peer that is slow for good jumps over iterations.

Luo et al. 2019, 7.3.5, Figures 18 and 19.

The paper. Ring-based graph, 16 workers, one of them 4 times slower for good. Backup neighbours alone do not help for
long: the tokens tie everybody to the slow one, iterations take 3.9 times as long. When it may skip up to 10 iterations
at once, 1.1 times; convergence is more than twice as fast as in the standard setting.

Here. The same with digits-mlp: standard; one backup (max_gap 8); the same with jumps of up to 2, and up to 10,
triggered when all out-neighbours are 2 ahead. The slowdown is that of the *other* peers, against the same policy on a
cluster where all are equally fast. With label-sorted shards the slow peer's labels are its own, and it skips most of
its iterations: what that costs is in the last rows.

What differs. A small model, a network that costs nearly nothing, no momentum. The paper does not tell max_gap.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.report.peers import apartness
from paceline.reproductions.base import Claim, Findings, Reproduction, Row, Say
from paceline.reproductions.peer_measures import format_times, loss_after, pace, reached_loss_s, times_sooner, train
from paceline.run import Run

SLOW = 0
CLUSTER = "one-slow:factor=4"
MODES = {
    "standard": "",
    "backup=1": ",backup=1,max_gap=8",
    "skip=2": ",backup=1,max_gap=8,skip=2,trigger=2",
    "skip=10": ",backup=1,max_gap=8,skip=10,trigger=2",
}


@dataclass(frozen=True)
class HopSkip(Reproduction, name="hop-skip", paper="Luo et al. 2019, Fig. 18, 19"):
    """Where one peer is 4x slower for good, skipping iterations turns a slowdown of 3.9x for all into 1.1x."""

    peers: int = 16
    iterations: int = 200

    @property
    def steps(self) -> int:
        return 2 * len(MODES)

    def measure(self, seed: int, say: Say) -> Findings:
        findings = Findings()
        after = 3 * self.iterations // 4
        for shards in ("shuffled", "sorted"):
            standard: Run | None = None
            for mode, options in MODES.items():
                policy = f"hop:graph=ring-based{options}"
                run = train(policy, self.peers, CLUSTER, self.iterations, seed, shards, self.device)
                even = train(policy, self.peers, "steady", self.iterations, seed, shards, self.device)
                standard = standard or run
                found = apartness(run.trace)
                row = {
                    "shards": shards, "mode": mode, "s_per_iteration": pace(run, SLOW),
                    "slowdown": pace(run, SLOW) / pace(even, SLOW), "largest_gap": max(found.gaps),
                    "jumps": len(found.jumps), "s_to_target": reached_loss_s(run, loss_after(standard, after)),
                    "loss_after": loss_after(run, after), "accuracy": run.history[-1].accuracy,
                    "accuracy_all_fast": even.history[-1].accuracy,
                }  # fmt: skip
                findings.rows.append(row)
                say(f"{policy}, {shards} shards: slowdown {row['slowdown']:.2f}x")
        findings.claims = claims(findings.rows)
        return findings


def claims(rows: list[Row]) -> list[Claim]:
    by = {(row["shards"], row["mode"]): row for row in rows}

    def sooner(shards: str, mode: str) -> float:
        return times_sooner(by[shards, mode], by[shards, "standard"], "s_to_target")

    slowdown = {mode: float(by["shuffled", mode]["slowdown"]) for mode in MODES}
    own = by["sorted", "skip=10"]
    return [
        Claim(
            "One slow peer slows everybody down, backup or not",
            "3.9x",
            f"{slowdown['standard']:.2f}x in the standard setting, {slowdown['backup=1']:.2f}x with one backup",
            slowdown["backup=1"] >= 3,
        ),
        Claim(
            "Skipping iterations frees the others",
            "1.1x (3.90 / 3.43)",
            f"{slowdown['skip=10']:.2f}x with jumps of up to 10, {slowdown['skip=2']:.2f}x with jumps of up to 2",
            slowdown["skip=10"] <= 1.25,
        ),
        Claim(
            "It converges more than twice as fast as the standard setting",
            "more than 2x",
            f"{format_times(sooner('shuffled', 'skip=10'))} with jumps of up to 10, "
            f"{format_times(sooner('shuffled', 'skip=2'))} with up to 2, "
            f"{format_times(sooner('shuffled', 'backup=1'))} with a backup alone",
            sooner("shuffled", "skip=10") > 2,
        ),
        Claim(
            "Also where the slow peer has labels of its own",
            "not examined",
            f"{format_times(sooner('sorted', 'skip=10'))}; accuracy at the end {own['accuracy']:.3f} against "
            f"{by['sorted', 'standard']['accuracy']:.3f} in the standard run",
            sooner("sorted", "skip=10") > 1,
            "the slow peer's labels are seen a quarter as often",
        ),
    ]
