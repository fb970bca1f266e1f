"""`paceline run`, `paceline resume` and `paceline report`: a training script in real processes, and what it leaves."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from paceline import rundir
from paceline.api import check_count, check_live
from paceline.commands import on_ray
from paceline.commands.live_table import LiveTable
from paceline.commands.on_ray import RayOptions
from paceline.commands.options import File, Flag, Folder, Maybe, Outputs
from paceline.commands.screen import console, show_table, size_of, tell_evaluated, tell_result, tell_slices
from paceline.core.policy import PeerPolicy
from paceline.errors import ConfigError, PacelineError
from paceline.policies import parse
from paceline.report.html import write
from paceline.run import Target
from paceline.runtime.live import memory
from paceline.tensors.layout import EPS, check_slicing

if TYPE_CHECKING:
    from paceline.commands.hosts import Serve
    from paceline.runtime.live.driver.keeping import Keeping
    from paceline.runtime.live.driver.launch import LivePlan

NOT_RESUMED = ("dir", "json", "report", "chrome")


@dataclass(kw_only=True)
class Live(Outputs):
    """A run in real processes, wherever they are."""

    workers: int = 2
    """How many processes run the script."""
    servers: Maybe[int] = None
    """How many servers the parameters are sliced over (1; none under a policy without servers, as hop)."""
    slicing: str = EPS
    """How: eps, equal slices; key-range, whole tensors, as many for each server, as in ps-lite."""
    policy: Maybe[str] = None
    """Who waits for whom; beats the policy in the script (bsp if neither says)."""
    cluster: Maybe[str] = None
    """Slow the workers down as this scenario says: a text as for `compare`, or a scenario.toml."""
    target: Maybe[str] = None
    """End the run when the script logs this: accuracy=0.95 or loss=0.1."""
    seed: int = 0
    """Of the injected slowdowns."""
    dir: Folder = None
    """The folder the run leaves; runs/TIME-SCRIPT if none."""
    checkpoint_updates: Maybe[int] = None
    """Checkpoint every so many updates; also at the end."""
    checkpoint_s: Maybe[float] = None
    """Checkpoint every so many seconds; also at the end."""
    durable: Flag = False
    """Servers log every push before they answer it: what is acknowledged survives kill -9 (docs/durability.md)."""
    durable_fsync: Flag = False
    """The same, and wait for the disk each time: it survives a power failure too."""
    restarts: int = 0
    """Start failed or killed workers again, so many times in all; then go on without them."""
    abort: Flag = False
    """End the run when a worker fails that is not restarted."""
    hang_timeout_s: Maybe[float] = None
    """Kill a worker that waits for nobody and has not pushed for so long."""
    timeout_s: Maybe[float] = None
    """Give up after so many seconds."""

    def run(self, script: list[str], resume: Path | None) -> int:
        """Check everything, then do the run where it is to be."""
        self.check()
        plan = self.plan(script)
        self.check_keeping(plan)
        with self.placed(plan, script) as plan:
            return self.carry_out(plan, script, resume)

    def placed(self, plan: LivePlan, script: list[str]) -> AbstractContextManager[LivePlan]:
        """The plan with places for its processes, for as long as it lasts."""
        return nullcontext(plan)

    def carry_out(self, plan: LivePlan, script: list[str], resume: Path | None) -> int:
        """Do the run, and tell what came of it."""
        from paceline.runtime.live.driver.launch import Driver

        folder = resume or self.make_folder(script[0])
        plan = self.keep(plan, folder, resume is not None)
        config = {**asdict(self), "script": script[0], "arguments": script[1:]}
        if plan.policy is not None:
            config["policy"] = str(plan.policy)  # a file of the user's with its whole path
        if resume is None:
            rundir.write_config(folder, config)
        label = self.policy or "the script's policy"
        with LiveTable(label, plan.target) as table:
            driver = Driver(plan, table.say, table.watch)
            table.driver = driver
            run = driver.run()
        run.config = config
        rundir.save(folder, run)
        tell_result(run)
        if not run.metrics.iterations and not run.failures:
            line = "WARNING: nothing was trained: no worker has called the step of its paceline.Optimizer"
            console.print(line, soft_wrap=True)
        show_table([run], f"{script[0]}, {size_of(run.trace.header.members)}, live")
        tell_slices([run])
        tell_evaluated([run])
        for path in self.save([run], run.config):
            console.print(f"wrote {path}", soft_wrap=True)
        for failure in run.failures:
            console.print(failure, soft_wrap=True)
        console.print(f"the run is in {folder}; its report: paceline report {folder}", soft_wrap=True)
        return 1 if run.failures else 0

    def plan(self, script: list[str]) -> LivePlan:
        """Everything checked, nothing started."""
        from paceline.runtime.live.driver.children import script_starter
        from paceline.runtime.live.driver.launch import LivePlan
        from paceline.runtime.live.driver.watching import Care

        size = check_live(self.workers, self.servers, self.policy, self.cluster, self.slicing, self.seed)
        if self.checkpoint_updates is not None:
            check_count("checkpoint-updates", self.checkpoint_updates)
        for name in ("checkpoint_s", "hang_timeout_s", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # also if it is NaN
                raise ConfigError(f"{name}={value:g} is out of range: more than 0")
        if self.restarts < 0:
            raise ConfigError(f"restarts={self.restarts} is out of range: 0 or more")
        return LivePlan(
            members=size.members,
            start_worker=script_starter(script[0], script[1:], self.workers, console.is_terminal),
            policy=size.policy,
            cluster=size.cluster,
            seed=self.seed,
            target=Target.parse(self.target) if self.target is not None else None,
            care=Care(self.restarts, self.abort, self.hang_timeout_s, self.timeout_s),
            slicing=check_slicing(self.slicing),
            servers_asked=self.servers,
        )

    def keep(self, plan: LivePlan, folder: Path, resume: bool) -> LivePlan:
        return replace(plan, keeping=self.keeping(folder, resume))

    def keeping(self, folder: Path, resume: bool = False) -> Keeping:
        from paceline.runtime.live.driver.keeping import Keeping
        from paceline.runtime.live.server.durable import Durable

        durable = Durable(fsync=self.durable_fsync) if self.durable or self.durable_fsync else None
        return Keeping(folder, self.checkpoint_updates, self.checkpoint_s, resume, durable)

    def check_keeping(self, plan: LivePlan) -> None:
        """Refuse checkpoints and logs that cannot be had, before there is a folder."""
        keeping = self.keeping(Path())
        if plan.policy is not None:
            keeping.check(plan.policy)
        if keeping.durable is not None and plan.cluster is not None and plan.cluster.resizes:
            raise ConfigError("[[servers]] in the scenario: the number of servers of a durable run is fixed")

    def make_folder(self, script: str) -> Path:
        try:
            if self.dir is None:
                return rundir.new(Path("runs"), Path(script).stem)
            folder = Path(self.dir)
            if (folder / rundir.CONFIG).exists():
                raise ConfigError(f"--dir {self.dir} holds a run already: paceline resume {self.dir} goes on with it")
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise ConfigError(f"--dir {self.dir}: the folder cannot be written")
            return folder
        except OSError as error:
            where = f"{self.dir or 'runs'}: {error.strerror}"
            raise ConfigError(f"no folder for the run can be made in {where} (--dir names another)") from None


@dataclass(kw_only=True)
class Run(Live):
    """Run a training script live: paceline run [options] SCRIPT.py [the script's own arguments].

    paceline run --workers 3 --servers 2 --policy ssp:staleness=3 examples/digits.py --lr 0.1

    The script uses paceline.init() and paceline.Optimizer (see examples/). What stands after SCRIPT.py is the
    script's. The run leaves a folder: configuration, metrics, trace, model.safetensors, checkpoints.
    """

    on: Maybe[Literal["ray"]] = None
    """Where: on this machine if nothing is said; ray, on a Ray cluster."""
    ray: Annotated[RayOptions, tyro.conf.OmitArgPrefixes] = field(default_factory=RayOptions)

    def main(self, script: list[str], resume: Path | None = None) -> int:
        check_script(script, "run")
        if self.on is None and self.ray != RayOptions():
            changed = [one.name for one in fields(RayOptions) if getattr(self.ray, one.name) != one.default]
            raise ConfigError(f"--{changed[0].replace('_', '-')} is for a run with --on ray")
        if self.on == "ray" and (self.durable or self.durable_fsync):
            raise ConfigError(
                "--durable keeps its logs on one machine's disk: with --on ray take --checkpoint-s instead"
            )
        return self.run(script, resume)

    def placed(self, plan: LivePlan, script: list[str]) -> AbstractContextManager[LivePlan]:
        return on_ray.placed(plan, self.ray, script) if self.on == "ray" else nullcontext(plan)

    def keeping(self, folder: Path, resume: bool = False) -> Keeping:
        keeping = super().keeping(folder, resume)
        if self.on == "ray" and self.checkpoint_updates is None and self.checkpoint_s is None:
            return replace(keeping, every_s=on_ray.CHECKPOINT_S, against_loss=True)
        return keeping

    def keep(self, plan: LivePlan, folder: Path, resume: bool) -> LivePlan:
        plan = super().keep(plan, folder, resume)
        if plan.keeping is not None and plan.keeping.against_loss and plan.members.servers:
            often = f"{on_ray.CHECKPOINT_S:g} s"
            line = f"a checkpoint every {often}: from the last one a lost server goes on (--checkpoint-s)"
            console.print(line, soft_wrap=True)
        return plan


def check_script(script: list[str], command: str) -> None:
    if not script:
        raise ConfigError(f"name a script: paceline {command} [options] SCRIPT.py [arguments]")
    if not Path(script[0]).is_file():
        raise ConfigError(f"there is no script {script[0]!r}")


@dataclass(kw_only=True)
class Resume:
    """Go on with a run from its last checkpoint: paceline resume DIR

    A durable run goes on from its servers' logs, if these know more than the checkpoint.
    The script, its arguments and all options are those of the run; --workers and --servers may differ.
    """

    dir: Annotated[str, tyro.conf.Positional]
    """The folder of the run."""
    workers: Maybe[int] = None
    """Another number of workers."""
    servers: Maybe[int] = None
    """Another number of servers: the parameters are sliced anew."""

    def main(self) -> int:
        folder = Path(self.dir)
        config = rundir.read_config(folder)
        if (shared := rundir.live_folder(folder)) is not None and memory.is_in_use(shared):
            raise ConfigError(f"the run in {self.dir!r} is going on: end it first, or wait for its end")
        script = [str(config.get("script")), *config.get("arguments", [])]
        kind: type[Run | Serve] = Run
        if "bind" in config:  # its workers come from other machines
            from paceline.commands.hosts import Serve

            kind = Serve
        self.bring_back(folder)
        given: dict[str, Any] = {
            field.name: config[field.name]
            for field in fields(kind)
            if field.name in config and field.name not in NOT_RESUMED
        }
        if "ray" in given:
            given["ray"] = RayOptions(**given["ray"])
        given["servers"] = self.last_servers(folder, given.get("servers"))
        for name in ("workers", "servers"):
            if (value := getattr(self, name)) is not None:
                given[name] = value
        return kind(**given).main(script if kind is Run else [], resume=folder)

    def bring_back(self, folder: Path) -> None:
        """Make a checkpoint of the logs of a durable run that did not end."""
        from paceline.runtime.live.driver.lasting import salvage

        if (made := salvage(folder)) is not None:
            console.print(f"going on from the logs of the servers, now the checkpoint {made}", soft_wrap=True)

    def last_servers(self, folder: Path, at_first: int | None) -> int | None:
        """How many servers the run had in the end: their number may have changed. None: it is one of peers."""
        from paceline.runtime.live import checkpoint

        try:
            manifest = checkpoint.latest(folder / checkpoint.FOLDER)[1]
            return None if isinstance(parse(manifest.policy), PeerPolicy) else len(manifest.shards)
        except PacelineError:
            return at_first  # there is nothing to resume from, which the run itself says best


@dataclass(kw_only=True)
class Servers:
    """Change the number of servers of a run that goes on: paceline servers DIR COUNT

    The workers are held before their next push, the least possible share of the parameters moves, and training
    goes on with nothing lost (docs/sharding.md). It says what moved and how long that took.
    """

    dir: Annotated[str, tyro.conf.Positional]
    """The folder of the run."""
    count: Annotated[int, tyro.conf.Positional]
    """How many servers there are to be."""

    def main(self) -> int:
        from paceline.runtime.live.driver.asking import ask_for_servers

        check_count("count", self.count)
        console.print(ask_for_servers(rundir.read_live(Path(self.dir)), self.count), soft_wrap=True)
        return 0


@dataclass(kw_only=True)
class Report:
    """Make the HTML report of one or several runs: paceline report DIR [DIR ...]"""

    dirs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders of runs; several are compared."""
    out: File = None
    """The file to write; report.html in the first folder if none."""

    def main(self) -> int:
        if not self.dirs:
            raise ConfigError("name at least one run's folder: paceline report DIR")
        runs = [rundir.load(Path(name)) for name in self.dirs]
        path = Path(self.out) if self.out is not None else Path(self.dirs[0]) / "report.html"
        Outputs(report=str(path)).check()
        write(path, [run.view() for run in runs], runs[0].config)
        console.print(f"wrote {path}", soft_wrap=True)
        return 0
