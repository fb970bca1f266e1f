"""The `paceline` program: picks the command, reads its options, turns errors into one line and an exit code.

0: done. 1: a run failed. 2: something the user wrote cannot be. 130: interrupted.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import tyro

from paceline.commands.bench import BenchExchange, BenchSafety, BenchStraggler
from paceline.commands.bench_gradients import BenchGradients
from paceline.commands.bench_peers import BenchPeers
from paceline.commands.bench_simulator import BenchSimulator
from paceline.commands.bench_tuner import BenchTuner
from paceline.commands.bench_zipline import BenchZipline
from paceline.commands.catalogue import Doctor, Policies, Scenarios
from paceline.commands.compare import Compare, Simulate
from paceline.commands.graph import Graph
from paceline.commands.host import Host
from paceline.commands.hosts import Join, Serve
from paceline.commands.replay import Replay
from paceline.commands.reproduce import Reproduce
from paceline.commands.run import Report, Resume, Run, Servers
from paceline.commands.tune import Tune
from paceline.errors import ConfigError, PacelineError

COMMANDS: dict[str, Any] = {
    "compare": Compare,
    "simulate": Simulate,
    "run": Run,
    "resume": Resume,
    "serve": Serve,
    "join": Join,
    "host": Host,
    "servers": Servers,
    "replay": Replay,
    "report": Report,
    "reproduce": Reproduce,
    "tune": Tune,
    "bench exchange": BenchExchange,
    "bench safety": BenchSafety,
    "bench straggler": BenchStraggler,
    "bench peers": BenchPeers,
    "bench gradients": BenchGradients,
    "bench simulator": BenchSimulator,
    "bench zipline": BenchZipline,
    "bench tuner": BenchTuner,
    "policies": Policies,
    "scenarios": Scenarios,
    "graph": Graph,
    "doctor": Doctor,
}
PLAINLY = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
"""What is not given need not be said: no `--json None`, no `--no-durable`."""
DESCRIPTION = "Train PyTorch models on machines of unequal speed: who waits for whom is a policy."


def main(arguments: list[str] | None = None) -> None:
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run one command; its exit code."""

    def work() -> int:
        own, script = split_script(arguments)
        command = read(own or ["--help"])
        if isinstance(command, Run | Serve | Host | Join):
            return command.main(script)
        return int(command.main())

    return guarded(work)


def guarded(work: Callable[[], int]) -> int:
    """Do it; what goes wrong is one line and an exit code."""
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
    """What is paceline's, and what is the script's: from the first *.py (or what follows `--`) on."""
    if not arguments or arguments[0] not in ("run", "serve", "join", "host"):
        return arguments, []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return arguments[:index], arguments[index + 1 :]
        if argument.endswith(".py") and arguments[index - 1] != "--policy":
            return arguments[:index], arguments[index:]
    return arguments, []


def read(arguments: list[str]) -> Any:
    """The command the arguments describe. tyro's boxed messages become one line."""
    if arguments[0] == "bench":
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        near = get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"there is no command {arguments[0]!r}{hint} (there are: {', '.join(COMMANDS)})")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.extras.subcommand_cli_from_dict(
                COMMANDS, prog="paceline", description=DESCRIPTION, args=arguments, config=PLAINLY
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_one_line(said.getvalue(), arguments)) from None


def _one_line(boxed: str, arguments: list[str]) -> str:
    # The first line is a title; the frame is of box characters or plain ones, as the terminal allows.
    body = [line.strip("│| ") for line in boxed.strip().splitlines()[1:] if any(map(str.isalpha, line))]
    message = body[0] if body else "the arguments cannot be read"
    hint = next((after for line, after in pairwise(body) if line.startswith("Perhaps")), None)
    if hint is not None:
        message += f", perhaps you meant {hint}"
    command = arguments[0] if arguments[0] in COMMANDS else None
    return f"{message} (see paceline {command + ' ' if command else ''}--help)"


if __name__ == "__main__":
    main()
