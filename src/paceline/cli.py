"""The `paceline` program: picks the command, reads its options, turns errors into one line and an exit code.

0: done. 1: a run failed. 2: something the user wrote cannot be. 130: interrupted.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, NamedTuple

from paceline.errors import ConfigError, PacelineError


class Command(NamedTuple):
    """Where a command is found. It is imported when it is called, since most commands need torch, which takes
    seconds."""

    module: str
    cls: str
    about: str
    """The line about it in `paceline --help`."""
    takes_script: bool = False
    workers_here: int = 0
    """How many workers run the script on this machine, if --workers does not say."""


GROUPS: dict[str, dict[str, Command]] = {
    "train": {
        "run": Command("run", "Run", "run a training script on this machine, in several processes", True, 2),
        "resume": Command("resume", "Resume", "go on with a run from its last checkpoint", True),
        "serve": Command("serve_join", "Serve", "hold a run's parameters for workers of other machines", True),
        "join": Command("serve_join", "Join", "take part in a run of another machine", True, 1),
        "host": Command("host", "Host", "be one node of a run that torchrun or Slurm has started", True, 1),
        "servers": Command("run", "Servers", "change the number of servers of a run that goes on"),
        "stop": Command("control", "Stop", "end a run that goes on in order, as Ctrl-C in its terminal does"),
        "checkpoint": Command("control", "Checkpoint", "have a run that goes on write a checkpoint now"),
        "top": Command("watch", "Top", "watch a run in a terminal, from another one than its own"),
        "page": Command("page", "Page", "serve a live page of a run on this machine"),
        "explain": Command("watch", "Explain", "say who slows a run down, since when and why"),
        "report": Command("run", "Report", "write the report of a run as one HTML file"),
        "replay": Command("replay", "Replay", "play the logs of a durable run again and compare"),
    },
    "explore": {
        "compare": Command("compare", "Compare", "compare policies on one workload, in virtual time or live"),
        "simulate": Command("compare", "Simulate", "train with one policy in virtual time"),
        "calibrate": Command("advice", "Calibrate", "make a scenario of what a live run has measured"),
        "advise": Command("advice", "Advise", "say which policy to take for a run, and how sure that is"),
        "whatif": Command("advice", "Whatif", "predict a run with other workers, servers, lines or speeds"),
        "validate": Command("advice", "Validate", "put live runs beside what virtual time predicts"),
        "tune": Command("tune", "Tune", "try specsync with a grid of abort times and rates"),
        "reproduce": Command("reproduce", "Reproduce", "do a paper's experiment again, its figures beside ours"),
        "policies": Command("catalogue", "Policies", "list the policies with parameters, ranges and papers"),
        "scenarios": Command("catalogue", "Scenarios", "list the scenarios of slow machines and faults"),
        "graph": Command("graph", "Graph", "draw a communication graph of peers and say how it averages"),
        "doctor": Command("catalogue", "Doctor", "say what this machine can do"),
    },
    "measure": {
        "bench exchange": Command("bench", "BenchExchange", "pushes a second beside torch RPC, Ray and DDP"),
        "bench straggler": Command("bench", "BenchStraggler", "time to a target with stragglers, beside DDP"),
        "bench thin": Command("bench", "BenchThin", "training over thin lines between hosts, beside DDP"),
        "bench balance": Command("bench_balance", "BenchBalance", "balanced beside equal batches, at unequal speeds"),
        "bench safety": Command("bench", "BenchSafety", "what checks, traces and deduplication cost"),
        "bench gpu": Command("bench_gpu", "BenchGpu", "steps of a model on the GPU, beside the plain loop and DDP"),
        "bench peers": Command("bench", "BenchPeers", "iterations of peers without servers"),
        "bench start": Command("bench", "BenchStart", "how soon many workers take their first step"),
        "bench gradients": Command("bench_virtual", "BenchGradients", "gradients of many virtual workers at once"),
        "bench simulator": Command("bench_virtual", "BenchSimulator", "events a second in virtual time"),
        "bench zipline": Command("bench_virtual", "BenchZipline", "the search for barriers beside the paper's"),
        "bench tuner": Command("bench_virtual", "BenchTuner", "how long the tuning of specsync takes"),
        "bench rounds": Command("bench_virtual", "BenchRounds", "rounds of local steps that end together, and others"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
DESCRIPTION = "Train PyTorch models on machines of unequal speed: who waits for whom is a policy."


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    own, script = split_script(arguments)
    workers = COMMANDS[own[0]].workers_here if script else 0
    for option, value in pairwise(own):
        if option == "--workers" and value.isdigit() and workers:
            workers = int(value)
    if not workers or {"--fresh", "--on", "-h", "--help"}.intersection(own):
        sys.exit(run(arguments))
    from paceline.runtime.live.system.fork_server import started_early

    with started_early(script, workers):
        code = run(arguments)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""

    def work() -> int:
        own, script = split_script(arguments)
        if not own or own[0] in ("-h", "--help"):
            print(overview())
            return 0
        command = read(own)
        if COMMANDS[name_of(own)].takes_script:
            return int(command.main(script))
        return int(command.main())

    with log_shown():
        return guarded(work)


class LogToStderr(logging.Handler):
    """Prints what the library logs, one line a record."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname}: {self.format(record)}", file=sys.stderr)


@contextlib.contextmanager
def log_shown() -> Iterator[None]:
    """Has warnings of the library printed meanwhile."""
    logger, handler = logging.getLogger("paceline"), LogToStderr()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def guarded(work: Callable[[], int]) -> int:
    """Does the work, and turns what goes wrong into one line and an exit code."""
    try:
        return work()
    except ConfigError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1


def split_script(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits paceline's own arguments from the script's, which begin with the first *.py, or follow `--`."""
    if not arguments or arguments[0] not in COMMANDS or not COMMANDS[arguments[0]].takes_script:
        return arguments, []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return arguments[:index], arguments[index + 1 :]
        if argument.endswith(".py") and arguments[index - 1] != "--policy":
            return arguments[:index], arguments[index:]
    return arguments, []


def overview() -> str:
    """Returns the text of `paceline --help`, without importing any command."""
    width = max(map(len, COMMANDS))
    lines = ["usage: paceline COMMAND [options]", "", DESCRIPTION]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:{width}}  {command.about}" for name, command in commands.items())]
    return "\n".join([*lines, "", "paceline COMMAND --help tells about one of them."])


def name_of(arguments: list[str]) -> str:
    """Returns the command that the arguments begin with, checked."""
    name = " ".join(arguments[:2]) if arguments[0] == "bench" else arguments[0]
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"there is no command {name!r}{hint} (there are: {', '.join(COMMANDS)})")
    return name


def read(arguments: list[str]) -> Any:
    """Reads the command that the arguments describe; tyro's boxed messages become one line."""
    name = name_of(arguments)
    command = getattr(importlib.import_module(f"paceline.commands.{COMMANDS[name].module}"), COMMANDS[name].cls)
    import tyro

    # What is not given need not be said: no `--json None`, no `--no-durable`.
    plainly = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(command, prog=f"paceline {name}", args=arguments[1 + name.count(" ") :], config=plainly)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_one_line(said.getvalue(), name)) from None


def _one_line(boxed: str, command: str) -> str:
    # The first line is a title; the frame is of box characters or plain ones, as the terminal allows.
    body = [line.strip("│| ") for line in boxed.strip().splitlines()[1:] if any(map(str.isalpha, line))]
    message = body[0] if body else "the arguments cannot be read"
    unknown = [word.partition("=")[0] for word in message.partition(": ")[2].split(", ") if word.startswith("--")]
    if message.startswith("Unrecognized") and unknown:
        message = f"there is no option {unknown[0]}"
        # tyro's own order puts --cpus-per-worker before --workers.
        similar = [line.split()[0] for line in body[1:] if line.startswith("--")]
        if near := get_close_matches(unknown[0], similar, n=1, cutoff=0.0):
            message += f", perhaps you meant {near[0]}"
    return f"{message} (see paceline {command} --help)"


if __name__ == "__main__":
    main()
