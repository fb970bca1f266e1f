"""`paceline run`: a training script in real processes on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.api import check_cluster, check_members, check_policy
from paceline.commands.options import Outputs
from paceline.commands.screen import Watching, console, show_table, tell_result
from paceline.errors import ConfigError
from paceline.run import Target


@dataclass(kw_only=True)
class Run(Outputs):
    """Run a training script live: paceline run [options] SCRIPT.py [the script's own arguments].

    paceline run --workers 3 --servers 2 --policy ssp:staleness=3 examples/digits.py --lr 0.1

    The script uses paceline.init() and paceline.Optimizer (see examples/). What stands after SCRIPT.py is the
    script's.
    """

    workers: int = 2
    """How many processes run the script."""
    servers: int = 1
    """How many servers the parameters are sliced over."""
    policy: str | None = None
    """Who waits for whom; beats the policy in the script (bsp if neither says)."""
    cluster: str | None = None
    """Slow the workers down as this scenario says: a text as for `compare`, or a scenario.toml."""
    target: str | None = None
    """End the run when the script logs this: accuracy=0.95 or loss=0.1."""
    seed: int = 0
    """Of the injected slowdowns."""
    timeout_s: float | None = None
    """Give up after so many seconds."""

    def main(self, script: list[str]) -> int:
        from paceline.runtime.live.children import script_starter
        from paceline.runtime.live.launch import Care, Driver, LivePlan

        self.check()
        if not script:
            raise ConfigError("name a script: paceline run [options] SCRIPT.py [arguments]")
        if not Path(script[0]).is_file():
            raise ConfigError(f"there is no script {script[0]!r}")
        members = check_members(self.workers, self.servers, self.seed)
        target = Target.parse(self.target) if self.target is not None else None
        plan = LivePlan(
            members=members,
            start_worker=script_starter(script[0], script[1:], self.workers),
            policy=check_policy(self.policy, members) if self.policy is not None else None,
            cluster=check_cluster(self.cluster, members) if self.cluster is not None else None,
            seed=self.seed,
            target=target,
            care=Care(timeout_s=self.timeout_s),
        )
        with Watching(f"{self.policy or 'live'}", target) as watch:
            run = Driver(plan, lambda line: console.print(line, soft_wrap=True), watch).run()
        run.config = {
            "script": script[0],
            "arguments": script[1:],
            "workers": self.workers,
            "servers": self.servers,
            "cluster": str(plan.cluster) if plan.cluster is not None else None,
            "target": str(target) if target is not None else None,
            "seed": self.seed,
        }
        tell_result(run)
        show_table([run], f"{script[0]}, {self.workers} workers, {self.servers} servers, live")
        for path in self.save([run], run.config):
            console.print(f"wrote {path}", soft_wrap=True)
        for failure in run.failures:
            console.print(failure, soft_wrap=True)
        return 1 if run.failures else 0
