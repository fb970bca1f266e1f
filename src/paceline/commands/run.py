"""`paceline run` and `paceline report`: a training script in real processes, and what it leaves."""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

from paceline import loggers, private_files, run_folder
from paceline.api import check_count
from paceline.commands import on_ray
from paceline.commands.live_table import LiveTable
from paceline.commands.on_ray import RayOptions
from paceline.commands.options import File, Flag, Folder, LocalStepOptions, Maybe, Outputs, WorkerStart
from paceline.commands.terminal import (
    console,
    print_evaluated,
    print_plain,
    print_result,
    print_slices,
    print_wall,
    show_table,
    size_of,
)
from paceline.errors import ConfigError, RunFailed
from paceline.live_checks import check_live
from paceline.policies.with_local_steps import text_of
from paceline.report.html import write
from paceline.run import INTERRUPTED, Point, Target
from paceline.tensors.layout import EPS, check_slicing

if TYPE_CHECKING:
    from paceline.runtime.live.driver.checkpointing import CheckpointOptions
    from paceline.runtime.live.driver.children import WorkerStarter
    from paceline.runtime.live.driver.driver import RunPlan


class Start(NamedTuple):
    """Where a run keeps its files, and from which checkpoint there it starts, if from one."""

    folder: Path
    resume: bool = True
    from_checkpoint: int | None = None
    """The number of the checkpoint; the newest if None."""


@dataclass(kw_only=True)
class Live(LocalStepOptions, Outputs, ABC):
    """The options of a run in real processes, wherever they are."""

    workers: int = 2
    """How many processes run the script."""
    servers: Maybe[int] = None
    """How many servers the parameters are sliced over (1; none under a policy without servers, as hop)."""
    servers_on: Literal["auto", "cpu", "gpu"] = "auto"
    """Where servers, or peers, have the parameters: auto, on the GPU if all models are there (docs/gpu.md)."""
    slicing: str = EPS
    """How parameters are cut: eps, equal slices; key-range, whole tensors, as many for each server, as in ps-lite."""
    policy: Maybe[str] = None
    """Who waits for whom; beats the policy in the script (bsp if neither says)."""
    cluster: Maybe[str] = None
    """Slow the workers down as this scenario says: a text as for `compare`, or a scenario.toml."""
    target: Maybe[str] = None
    """End the run when the script logs this: accuracy=0.95, loss=0.1, or any metric as 'val_loss<=2', 'f1>=0.9'."""
    seed: int = 0
    """The seed of the injected slowdowns."""
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
    """Kill a worker that waits for nobody and has not pushed for so long (docs/faults.md)."""
    timeout_s: Maybe[float] = None
    """Give up after so many seconds."""
    log: tuple[str, ...] = ()
    """Where logged metrics go besides: csv, tensorboard, or a plug-in, as mine:key=value (docs/watching.md)."""
    page: Flag = False
    """Serve a live page of the run on this machine, in a process that outlives it (docs/watching.md)."""

    def run(self, script: list[str], start: Start | None) -> int:
        """Checks everything, then does the run where it is to be."""
        self.check()
        if self.page:
            from paceline.page.server import check_installed

            check_installed()
        loggers.find(self.log)
        plan = self.plan(script)
        self.check_keeping(plan)
        with self.placed(plan, script) as plan:
            return self.execute(plan, script, start)

    def placed(self, plan: RunPlan, script: list[str]) -> AbstractContextManager[RunPlan]:
        """Yields the plan with places for its processes, for as long as it lasts."""
        return nullcontext(plan)

    def execute(self, plan: RunPlan, script: list[str], start: Start | None) -> int:
        """Does the run, and prints what came of it."""
        from paceline.runtime.live.driver.driver import Driver
        from paceline.runtime.live.driver.durability import can_be_resumed

        start = start or Start(self.make_folder(script[0]), resume=False)
        folder = start.folder
        plan = self.keep(plan, start)
        config = {**asdict(self), "script": script[0], "arguments": script[1:]}
        if plan.policy is not None:
            within = plan.local_steps if self.local_steps is None and self.every_s is None else None
            config["policy"] = text_of(str(plan.policy), within)  # a file of the user's with its whole path
            config["outer"] = None if within is not None else self.outer
        self.write_config(folder, config)
        run_folder.forget_end(folder)
        if self.page:
            from paceline.commands.page import start_page

            for line in start_page(folder):
                print_plain(line)
        label = self.policy or "the script's policy"
        with loggers.opened(loggers.find(self.log), folder, config) as kept, LiveTable(label, plan.target) as table:

            def watch(point: Point) -> None:
                table.watch(point)
                kept.log(*point)

            driver = Driver(plan, table.say, watch, table.say_error)
            table.parts = driver.parts
            try:
                run = driver.run()
            except (KeyboardInterrupt, RunFailed):
                if can_be_resumed(folder):
                    table.say(resume_line(folder))
                raise
        run.config = config
        model = run_folder.save(folder, run)
        print_result(run)
        if driver.parts.guard.lost:
            print_plain(f"WARNING: {folder} was deleted while the run went on, and made again: the model is in {model}")
            print_plain("WARNING: the trace is lost, so that the table and the metrics do not say what was trained")
        elif not run.trace_is_whole:
            print_plain("WARNING: there was no room for the whole trace: the table and the metrics tell its beginning")
        elif not run.metrics.gradients and not run.failures:
            line = "WARNING: nothing was trained: no worker has called the step of its paceline.Optimizer"
            console.print(line, soft_wrap=True)
        show_table([run], f"{script[0]}, {size_of(run.trace.header.members)}, live")
        print_slices([run])
        print_wall([run])
        print_evaluated([run])
        for failure in run.failures:
            console.print(failure, soft_wrap=True)
        console.print(f"the run is in {folder}; its report: paceline report {folder}", soft_wrap=True)
        if run.ended == INTERRUPTED:
            print_plain(resume_line(folder))
        for path in self.save([run], run.config):
            console.print(f"wrote {path}", soft_wrap=True)
        return 1 if run.failures or model.parent != folder else 0

    def write_config(self, folder: Path, config: dict[str, Any]) -> None:
        try:
            run_folder.write_config(folder, config)
        except OSError as error:
            where = f"{folder / run_folder.CONFIG} cannot be written: {error.strerror}"
            raise ConfigError(f"{where} (--dir names another folder)") from None

    def plan(self, script: list[str]) -> RunPlan:
        """Checks everything, and starts nothing."""
        from paceline.runtime.live.driver.driver import RunPlan
        from paceline.runtime.live.driver.health import FaultPolicy

        size = check_live(
            self.workers, self.servers, self.policy, self.cluster, self.slicing, self.seed, self.local_steps,
            self.every_s, self.outer,
        )  # fmt: skip
        if self.checkpoint_updates is not None:
            check_count("checkpoint-updates", self.checkpoint_updates)
        for name in ("checkpoint_s", "hang_timeout_s", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # also if it is NaN
                raise ConfigError(f"{name}={value:g} is out of range: more than 0")
        if self.restarts < 0:
            raise ConfigError(f"restarts={self.restarts} is out of range: 0 or more")
        return RunPlan(
            members=size.members,
            starter=self.starter(script, self.workers, console.is_terminal),
            policy=size.policy,
            local_steps=size.local_steps,
            cluster=size.cluster,
            seed=self.seed,
            target=Target.parse(self.target) if self.target is not None else None,
            care=FaultPolicy(self.restarts, self.abort, self.hang_timeout_s, self.timeout_s),
            slicing=check_slicing(self.slicing),
            servers_asked=self.servers,
            servers_on=self.servers_on,
        )

    @abstractmethod
    def starter(self, script: list[str], workers: int, merged: bool = True) -> WorkerStarter:
        """Returns what starts so many workers on this machine."""

    def keep(self, plan: RunPlan, start: Start) -> RunPlan:
        return replace(plan, checkpointing=self.checkpointing(start))

    def checkpointing(self, start: Start) -> CheckpointOptions:
        from paceline.runtime.live.driver.checkpointing import CheckpointOptions
        from paceline.runtime.live.protocol.records import DurabilityOptions

        durable = DurabilityOptions(fsync=self.durable_fsync) if self.durable or self.durable_fsync else None
        folder, resume, number = start
        return CheckpointOptions(folder, self.checkpoint_updates, self.checkpoint_s, resume, number, durable)

    def check_keeping(self, plan: RunPlan) -> None:
        """Refuses checkpoints and logs that cannot be had, before there is a folder."""
        checkpointing = self.checkpointing(Start(Path(), resume=False))
        if plan.policy is not None:
            checkpointing.check(plan.policy)
        if checkpointing.durable is not None and plan.cluster is not None and plan.cluster.resizes:
            raise ConfigError("[[servers]] in the scenario: the number of servers of a durable run is fixed")

    def make_folder(self, script: str) -> Path:
        try:
            if self.dir is None:
                return run_folder.new(Path("runs"), Path(script).stem)
            folder = Path(self.dir)
            if (folder / run_folder.CONFIG).exists():
                raise ConfigError(f"--dir {self.dir} holds a run already: paceline resume {self.dir} goes on with it")
            private_files.make_folder(folder, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise ConfigError(f"--dir {self.dir}: the folder cannot be written")
            return folder
        except OSError as error:
            where = f"{self.dir or 'runs'}: {error.strerror}"
            raise ConfigError(f"no folder for the run can be made in {where} (--dir names another)") from None


@dataclass(kw_only=True)
class Run(WorkerStart, Live):
    """Run a training script live: paceline run [options] SCRIPT.py [the script's own arguments].

    paceline run --workers 3 --servers 2 --policy ssp:staleness=3 examples/digits.py --lr 0.1

    The script uses paceline.init() and paceline.Optimizer (see examples/). What stands after SCRIPT.py is the
    script's. The run leaves a folder: configuration, metrics, trace, model.safetensors, checkpoints.
    """

    on: Maybe[Literal["ray"]] = None
    """Where processes run: on this machine if nothing is said; ray, on a Ray cluster."""
    ray: Annotated[RayOptions, tyro.conf.OmitArgPrefixes] = field(default_factory=RayOptions)

    def main(self, script: list[str], start: Start | None = None) -> int:
        check_script(script, "run")
        if self.on is None and self.ray != RayOptions():
            changed = [one.name for one in fields(RayOptions) if getattr(self.ray, one.name) != one.default]
            raise ConfigError(f"--{changed[0].replace('_', '-')} is for a run with --on ray")
        if self.on == "ray" and (self.durable or self.durable_fsync):
            raise ConfigError(
                "--durable keeps its logs on one machine's disk: with --on ray take --checkpoint-s instead"
            )
        return self.run(script, start)

    def placed(self, plan: RunPlan, script: list[str]) -> AbstractContextManager[RunPlan]:
        return on_ray.placed(plan, self.ray, self, script) if self.on == "ray" else nullcontext(plan)

    def checkpointing(self, start: Start) -> CheckpointOptions:
        checkpointing = super().checkpointing(start)
        if self.on == "ray" and self.checkpoint_updates is None and self.checkpoint_s is None:
            return replace(checkpointing, every_s=on_ray.CHECKPOINT_S, against_loss=True)
        return checkpointing

    def keep(self, plan: RunPlan, start: Start) -> RunPlan:
        plan = super().keep(plan, start)
        if plan.checkpointing is not None and plan.checkpointing.against_loss and plan.members.servers:
            often = f"{on_ray.CHECKPOINT_S:g} s"
            line = f"a checkpoint every {often}: from the last one a lost server goes on (--checkpoint-s)"
            console.print(line, soft_wrap=True)
        return plan


def check_script(script: list[str], command: str) -> None:
    if not script:
        raise ConfigError(f"name a script: paceline {command} [options] SCRIPT.py [arguments]")
    if not Path(script[0]).is_file():
        raise ConfigError(f"there is no script {script[0]!r}")


def resume_line(folder: Path) -> str:
    """Returns the line to go on with a run that has been stopped."""
    return f"to go on with it: paceline resume {shlex.quote(str(folder))}"


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
        from paceline.runtime.live.driver.control_client import ask_for_servers

        check_count("count", self.count)
        console.print(ask_for_servers(run_folder.read_live(Path(self.dir)), self.count), soft_wrap=True)
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
        runs = [run_folder.load(Path(name)) for name in self.dirs]
        path = Path(self.out) if self.out is not None else Path(self.dirs[0]) / "report.html"
        Outputs(report=str(path)).check()
        write(path, [run.view() for run in runs], runs[0].config)
        console.print(f"wrote {path}", soft_wrap=True)
        return 0
