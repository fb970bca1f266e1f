"""What an exchange costs, and the cores it is paid with: the table [costs] of a scenario (virtual time).

    [costs]
    cores = 2                # shared by all workers and servers; without it there are enough
    worker_s = 0.0003        # processor time of a worker in each exchange
    message_s = 0.00005      # of a server for each push it hears of, besides message_byte_s for each byte of its slice,
    step_s = 0.0001          # for each step, besides step_byte_s for each byte it reads or writes,
    answer_s = 0.00003       # and for each answer, besides answer_byte_s

Without the table exchanges cost what latency and bandwidth say, and nobody waits for a core or for a server.
`paceline calibrate` measures it. How much of a computation needs a core: all of it, or `cpu_share` of it; or, where a
scenario has live workers wait until their iteration has lasted long enough, `cpu_s`, and the rest is waited out.
"""

from __future__ import annotations

import math

from msgspec import Struct

from paceline.errors import ConfigError


class Costs(Struct, frozen=True, forbid_unknown_fields=True):
    """What an exchange costs on the processors of its hosts, in seconds."""

    cores: float | None = None
    worker_s: float = 0.0
    message_s: float = 0.0
    message_byte_s: float = 0.0
    step_s: float = 0.0
    step_byte_s: float = 0.0
    answer_s: float = 0.0
    answer_byte_s: float = 0.0
    cpu_share: float = 1.0
    cpu_s: float | None = None
    first_s: float = 0.0
    """Processor time that a worker's first iteration needs besides: libraries load, caches are cold."""
    startup_s: float = 0.0
    """From the start of a run until it trains."""

    def of_push(self, nbytes: int) -> float:
        """Returns the seconds that a server needs to hear of a push of so many bytes."""
        return self.message_s + nbytes * self.message_byte_s

    def of_step(self, gradients: int, nbytes: int) -> float:
        """Returns the seconds that a server needs for a step on so many gradient slices of so many bytes.

        It reads them, and reads and writes the parameters.
        """
        return self.step_s + (gradients + 2) * nbytes * self.step_byte_s

    def of_answer(self, nbytes: int, copied: bool) -> float:
        """Returns the seconds that a server needs for an answer of so many bytes; `copied` if parameters are read and
        written for it, and not read by all workers where they are."""
        return self.answer_s + nbytes * (self.answer_byte_s + 2 * copied * self.step_byte_s)

    def of_peer(self, neighbours: float, nbytes: int) -> float:
        """Returns the seconds that a peer needs besides, to step and to exchange parameters with its neighbours."""
        return self.of_step(1, nbytes) + neighbours * (self.of_push(nbytes) + self.of_answer(nbytes, copied=True))


class MeasuredWorker(Struct, frozen=True, forbid_unknown_fields=True):
    """How long one worker's computations take, as measured: a table [[worker]] of a scenario.

    `compute_s` is their mean. `spread` has, in order, what each of so many equally likely parts of them is of that.
    `memory` is how much one is like the one before (their correlation, from 0 to 1), `common` how much is common to all
    workers. `trend` has factors, each for `trend_iterations`, the last for good.
    """

    compute_s: float
    spread: tuple[float, ...] = (1.0,)
    memory: float = 0.0
    common: float = 0.0
    trend: tuple[float, ...] = (1.0,)
    trend_iterations: int = 1


ALLOWED = {
    "cores": "a number of cores, more than 0",
    "cpu_share": "a number from 0 to 1",
    "memory": "a number from 0 to 1",
    "common": "a number from 0 to 1",
    "spread": "a list of numbers, 0 or more",
    "trend": "a list of numbers, 0 or more",
    "trend_iterations": "a whole number, 1 or more",
}
OTHERWISE = "a number of seconds, 0 or more"


def check(table: Costs | MeasuredWorker, label: str) -> None:
    """Refuses values that cannot be."""
    for name in table.__struct_fields__:
        value = getattr(table, name)
        numbers = value if isinstance(value, tuple) else (value,)
        least = {"cores": 1e-3, "trend_iterations": 1}.get(name, 0.0)
        most = 1.0 if name in ("cpu_share", "memory", "common") else math.inf
        sound = all(each is None or (least <= each <= most and math.isfinite(each)) for each in numbers)
        if not sound or not numbers:
            written = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"{label}: {name}={written} is out of range: {ALLOWED.get(name, OTHERWISE)}")
