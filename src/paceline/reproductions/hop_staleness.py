"""hop-staleness: bounded staleness instead of backup neighbours.

Luo et al. 2019, 7.3.4, Figure 17.

The paper. Ring-based graph, 16 workers, 6x random slowdown, staleness bound 5: "a similar speedup to that with backup
workers, and they both outperform the standard decentralized setting".

Here. The same with digits-mlp, in both orders, and with label-sorted shards. Updates are weighted by how new they
are (eq. 2). An update of a peer that is *ahead* weighs more than one's own, so those behind are drawn along by those
who have made more steps. `lead` says by how many iterations, in the mean over all averages. In parallel order the loss
then falls faster by iterations than in the standard run; in serial order it does not.

What differs. A small model, a network that costs nearly nothing, no momentum.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.reproductions.base import Claim, Findings, Reproduction, Row, Say
from paceline.reproductions.peer_measures import (
    format_times,
    lead,
    loss_after,
    pace,
    reached_loss_s,
    times_sooner,
    train,
)
from paceline.run import Run

CLUSTER = "random-slowdown:factor=6"
MODES = {"standard": "", "backup=1": ",backup=1,max_gap=8", "staleness=5": ",staleness=5,max_gap=8"}


@dataclass(frozen=True)
class HopStaleness(Reproduction, name="hop-staleness", paper="Luo et al. 2019, Fig. 17"):
    """Staleness 5 gains about as much as a backup neighbour under random slowdown."""

    peers: int = 16
    iterations: int = 200

    @property
    def settings(self) -> list[tuple[str, str]]:
        """Returns the settings as (order, shards)."""
        return [("parallel", "shuffled"), ("serial", "shuffled"), ("parallel", "sorted")]

    @property
    def steps(self) -> int:
        return len(MODES) * len(self.settings)

    def measure(self, seed: int, say: Say) -> Findings:
        findings = Findings()
        after = 3 * self.iterations // 4
        for order, shards in self.settings:
            standard: Run | None = None
            for mode, options in MODES.items():
                policy = f"hop:graph=ring-based{options},order={order}"
                run = train(policy, self.peers, CLUSTER, self.iterations, seed, shards, self.device)
                standard = standard or run
                row = {
                    "order": order, "shards": shards, "mode": mode, "s_per_iteration": pace(run),
                    "faster": pace(standard) / pace(run), "loss_after": loss_after(run, after),
                    "s_to_target": reached_loss_s(run, loss_after(standard, after)),
                    "lead": lead(run), "consensus": run.consensus[-1][1],
                    "accuracy": run.history[-1].accuracy,
                }  # fmt: skip
                findings.rows.append(row)
                say(f"{policy}, {shards} shards: {row['s_per_iteration']:.3f} s an iteration")
        findings.claims = claims(findings.rows)
        return findings


def claims(rows: list[Row]) -> list[Claim]:
    by = {(row["order"], row["shards"], row["mode"]): row for row in rows}

    def sooner(order: str, shards: str, mode: str) -> float:
        return times_sooner(by[order, shards, mode], by[order, shards, "standard"], "s_to_target")

    stale, backup = by["parallel", "shuffled", "staleness=5"], by["parallel", "shuffled", "backup=1"]
    serial = by["serial", "shuffled", "staleness=5"]
    similar = 0.8 < stale["faster"] / backup["faster"] < 1.25
    own, apart = (by["parallel", "sorted", mode] for mode in ("standard", "staleness=5"))
    return [
        Claim(
            "Staleness makes iterations about as much faster as a backup neighbour",
            "similar, by the curves",
            f"{stale['faster']:.2f}x against {backup['faster']:.2f}x in parallel order, "
            f"{serial['faster']:.2f}x against {by['serial', 'shuffled', 'backup=1']['faster']:.2f}x in serial order",
            similar,
        ),
        Claim(
            "Both converge sooner than the standard setting",
            "both outperform it",
            ", ".join(
                f"{mode} {format_times(sooner(order, 'shuffled', mode))} ({order})"
                for order in ("parallel", "serial")
                for mode in ("staleness=5", "backup=1")
            ),
            all(sooner(order, "shuffled", mode) > 1 for order in ("parallel", "serial") for mode in list(MODES)[1:]),
        ),
        Claim(
            "Also where each peer has labels of its own",
            "not examined",
            f"staleness=5 {format_times(sooner('parallel', 'sorted', 'staleness=5'))}, backup=1 "
            f"{format_times(sooner('parallel', 'sorted', 'backup=1'))}; accuracy at the end {apart['accuracy']:.3f} "
            f"with staleness against {own['accuracy']:.3f} in the standard run",
            sooner("parallel", "sorted", "staleness=5") > 1,
        ),
    ]
