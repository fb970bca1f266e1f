"""`paceline calibrate`, `advise`, `whatif` and `validate`: predictions of live runs, and how good they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from paceline import policies
from paceline.advice import advisor
from paceline.advice.advisor import Advice, Goal
from paceline.advice.changes import Changes
from paceline.advice.drawing import picture
from paceline.advice.scenario_file import write
from paceline.advice.validation import NO_SCENARIO, Plan, Row, summary, validate
from paceline.commands.known_run import Known, of_run
from paceline.commands.options import File, Maybe, check_file
from paceline.commands.tables import dash, print_table, write_json
from paceline.commands.terminal import print_plain, size_of
from paceline.core.messages import Members
from paceline.counts import check_count
from paceline.errors import ConfigError
from paceline.run import write_whole


@dataclass(kw_only=True)
class Calibrate:
    """Make a scenario of a live run: paceline calibrate DIR -o cluster.toml

    It has each worker's computing times as they were, the cores they shared, and what exchanges cost. Use it anywhere
    a scenario goes: paceline compare --cluster cluster.toml. A run of bsp says most (docs/advice.md).
    """

    dir: Annotated[str, tyro.conf.Positional]
    """The folder of the run."""
    out: Annotated[str, tyro.conf.arg(aliases=["-o"])] = "cluster.toml"
    """The scenario file to write."""

    def main(self) -> int:
        check_file("--out", self.out)
        found = of_run(self.dir)
        write_whole(Path(self.out), write(found, self.dir).encode())
        measured = found.measured
        print_plain(
            f"{measured.policy}, {measured.workers} workers, {measured.iterations} iterations of each: an iteration "
            f"takes {1e3 * measured.iteration_s:.2f} ms, {1e3 * measured.compute_s:.2f} ms of it computing; in virtual "
            f"time {1e3 * found.fitted_s:.2f} ms"
        )
        print_plain(f"wrote {self.out}")
        return 0


@dataclass(kw_only=True)
class WhatIf:
    """What is to be different from the run, or from the scenario."""

    workers: Maybe[int] = None
    """So many workers, as those that there are over and over, on as many cores each."""
    servers: Maybe[int] = None
    """So many servers."""
    without: Maybe[int] = None
    """Without this worker."""
    link: Maybe[str] = None
    """Another line to each server: 1Gbit, 100Mbit, or 100Mbit,2ms with its latency."""
    slow: Maybe[str] = None
    """A worker that takes longer: 2:3x is worker 2, three times as long."""

    def changes(self) -> Changes:
        return Changes(**{field.name: getattr(self, field.name) for field in fields(Changes)})


@dataclass(kw_only=True)
class Advise(WhatIf):
    """Say which policy to take for a run: paceline advise DIR, or a scenario and --workers

    What would take how long is predicted in virtual time, from what the run has measured. Policies are ranked by the
    time per gradient; with --workload and --target, by the time to the target. docs/advice.md says what it assumes.
    """

    dir: Annotated[str, tyro.conf.Positional]
    """The folder of a live run, or a scenario: a file that paceline calibrate wrote, or a name."""
    policies: tuple[str, ...] = ()
    """The policies to try; if none are named, those that may be worth it."""
    workload: Maybe[str] = None
    """A workload like your training, to rank by the time to --target."""
    target: Maybe[str] = None
    """What the workload is to reach, as accuracy=0.9."""
    batch: Maybe[int] = None
    """Samples per worker and iteration of the workload; its own if none."""
    optimizer: Maybe[str] = None
    """The optimizer of the workload; its own if none."""
    seeds: int = advisor.SEEDS
    """How many runs of each are simulated."""
    json: File = None
    """Write the advice to this file as JSON."""

    def main(self) -> int:
        check_file("--json", self.json)
        check_count("seeds", self.seeds)
        if (self.workload is None) != (self.target is None):
            raise ConfigError("--workload and --target belong together: the time to the target is predicted then")
        known = Known(self.dir, self.changes())
        for policy in self.policies:
            policies.parse(policy).validate(known.after.members)
        goal = None
        if self.workload is not None and self.target is not None:
            goal = Goal(self.workload, self.target, self.batch, self.optimizer)
        found = advisor.advise(known.after, goal, self.policies, self.seeds, known.uncertainty)
        command = known.command(found.chosen.policy)
        show(found, known, goal)
        is_so = found.changes_nothing and known.policy in ("", "bsp") and not (known.config and known.changes)
        print_plain("next: nothing is to be changed" if is_so else f"next: {command}")
        chosen = found.chosen
        write_json(
            self.json,
            {
                "policy": chosen.policy,
                "predicted": chosen.predicted,
                "interval": [chosen.low, chosen.high],
                "command": command,
                "ranked_by": found.ranked_by,
                "reason": found.reason,
                "dominated_by": found.dominated_by,
                "candidates": [asdict(each) for each in found.candidates],
            },
        )
        return 0


@dataclass(kw_only=True)
class Whatif(WhatIf):
    """What if there were other workers, servers, lines or speeds: paceline whatif DIR --workers 64 --link 1Gbit

    Times per gradient of some policies as it is and with the changes, in virtual time, from what a run has measured.
    """

    dir: Annotated[str, tyro.conf.Positional]
    """The folder of a live run, or a scenario: a file that paceline calibrate wrote, or a name."""
    policies: tuple[str, ...] = ("bsp", "ssp:staleness=3", "asp")
    """The policies to try."""
    seeds: int = 3
    """How many runs of each are simulated."""
    picture: File = None
    """Draw it into this SVG file: above as it is, below with the changes."""
    json: File = None
    """Write the table to this file as JSON."""

    def main(self) -> int:
        check_file("--json", self.json)
        check_file("--picture", self.picture)
        check_count("seeds", self.seeds)
        changes = self.changes()
        if not changes:
            raise ConfigError("what if what? Name a change: --workers, --without, --link, --servers or --slow")
        known = Known(self.dir, changes)
        both = (known.before, known.after)
        for name in self.policies:
            for situation in both:
                policies.parse(name).validate(situation.members)
        found = {
            name: [advisor.per_gradient(name, each, self.seeds, 0.0).predicted for each in both]
            for name in dict.fromkeys(self.policies)
        }
        table = [[name, ms(was), ms(now), f"{was / now:.2f}x"] for name, (was, now) in found.items()]
        rows = [{"policy": name, "before_s": was, "after_s": now} for name, (was, now) in found.items()]
        headings = ["policy", "as it is, ms", "changed, ms", "gradients per second"]
        print_table(f"time per gradient, {changes}", headings, table, ("policy",))
        if self.picture is not None:
            drawn = picture(
                f"Time per gradient as it is, and below: {changes}",
                {name: (was, now) for name, (was, now) in found.items()},
            )
            print_plain(f"wrote {write_whole(Path(self.picture), drawn.encode())}")
        write_json(self.json, {"changes": str(changes), "rows": rows})
        return 0


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def show(found: Advice, known: Known, goal: Goal | None) -> None:
    """Prints the advice."""
    slow = max(each.predicted for each in found.candidates) >= 1
    unit, scale = ("s", 1.0) if slow else ("ms", 1e3)
    table = []
    for each in found.candidates:
        times = found.reference.predicted / each.predicted
        table.append(
            [
                ("* " if each is found.chosen else "  ") + each.policy,
                f"{scale * each.predicted:.2f} {unit}",
                f"{scale * each.low:.2f} to {scale * each.high:.2f}",
                f"{times:.2f}x" + (f", missed {each.missed}" if each.missed else ""),
                dash(each.staleness, ".1f"),
            ]
        )
    members = known.after.members
    print_plain(f"{found.ranked_by}, {size_of(Members(members.workers, max(1, members.servers)))}")
    print_table("", ["policy", "predicted", "95 %", "over bsp", "staleness"], table, ("policy",))
    print_plain(f"{found.chosen.policy}: {found.reason}")
    strongest, share = next(iter(found.dominated_by.items()))
    parts = ", ".join(f"{name} {max(0.0, gain):.0%}" for name, gain in found.dominated_by.items())
    what = strongest if share > 0.02 else "nothing but computing"
    print_plain(f"what costs most under bsp: {what} (without each alone it would take so much less: {parts})")
    if goal is None:
        print_plain(
            "ranked by time per gradient, which does not know what a stale gradient is worth: policies with very stale "
            "ones are shown and not advised (--workload and --target rank by the time to a target)"
        )
    print_plain(
        "assumed: computing times stay as they were measured, and gradients as large"
        + (f"; {known.changes}" if known.changes else "")
    )


@dataclass(kw_only=True)
class Validate:
    """Do live runs and predict them: paceline validate bsp ssp:staleness=3 asp --scenarios random-slowdown

    Each policy under each scenario and over each transport, live on this machine and in virtual time; errors are those
    of the predicted time. The machine should be quiet.
    """

    policies: Annotated[tuple[str, ...], tyro.conf.Positional] = (
        "bsp", "ssp:staleness=3", "backup:extra=1", "asp", "pssp", "dssp", "deadline", "elastic", "specsync", "hop",
    )  # fmt: skip
    """The policies."""
    scenarios: tuple[str, ...] = ("random-slowdown", "lognormal", "one-slow", "production-one-slow-rank")
    """The scenarios, all scaled to --compute-s; none: no scenario, the workers compute as fast as they can."""
    transports: tuple[str, ...] = ("memory", "tcp")
    """memory: shared memory; tcp: TCP over the loopback, as between hosts; keys: the same, encrypted."""
    workload: str = "digits-mlp"
    """What is trained."""
    workers: int = 4
    """How many workers."""
    servers: int = 1
    """How many servers."""
    iterations: int = 60
    """Iterations of each worker."""
    batch: Maybe[int] = None
    """Samples per worker and iteration; the workload's own if none."""
    compute_s: float = 0.02
    """Seconds of an undisturbed iteration under a scenario."""
    seed: int = 0
    """The seed of runs and scenarios."""
    json: File = None
    """Write rows and errors to this file as JSON."""

    def main(self) -> int:
        check_file("--json", self.json)
        if not 0 < self.compute_s < 10:
            raise ConfigError(f"compute-s={self.compute_s:g} is out of range: more than 0, less than 10")
        if not (self.policies and self.scenarios and self.transports):
            raise ConfigError("name at least one policy, one scenario and one transport")
        plan = Plan(
            self.policies, self.scenarios, self.transports, self.workload, self.workers, self.servers, self.iterations,
            self.batch, self.compute_s, self.seed,
        )  # fmt: skip
        rows = validate(plan, lambda row: print_plain(_said(row)))
        found = summary(rows)
        table = [
            [
                row.policy.partition(":")[0], row.scenario, row.transport, f"{row.live_s:.3f}", f"{row.virtual_s:.3f}",
                f"{row.error:+.1%}", f"{row.live_waiting:.0%} / {row.virtual_waiting:.0%}",
                f"{row.live_staleness:.1f} / {row.virtual_staleness:.1f}",
            ]
            for row in rows
        ]  # fmt: skip
        headings = ["policy", "scenario", "transport", "live s", "virtual s", "error", "waiting", "staleness"]
        print_table("live beside virtual time", headings, table, ("policy", "scenario", "transport"))
        print_plain(
            f"error of the time: mean {found['mean_error']:.1%}, worst {found['worst_error']:.1%}; policies in the "
            f"order of live times in {found['pairs_in_order']} of {found['pairs']} pairs that are 5 % or more apart"
        )
        write_json(self.json, found)
        return 0


def _said(row: Row) -> str:
    where = "computing" if row.scenario == NO_SCENARIO else row.scenario
    times = f"live {row.live_s:.3f} s, virtual {row.virtual_s:.3f} s, {row.error:+.1%}"
    return f"{row.policy}, {where}, {row.transport}: {times}"
