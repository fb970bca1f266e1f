"""`paceline bench balance`: balanced batches beside equal ones, live."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.bench import balance, drawing
from paceline.commands.benchmark import Benchmark
from paceline.commands.options import File, check_file
from paceline.commands.tables import print_table
from paceline.commands.terminal import print_plain
from paceline.errors import ConfigError


@dataclass(kw_only=True)
class BenchBalance(Benchmark):
    """What workers of unequal speed push together, of what they could: balanced batches beside equal ones, live.

    paceline bench balance --speeds 8 4 2 1 --json balance.json
    """

    speeds: tuple[float, ...] = (8.0, 4.0, 2.0, 1.0)
    """The speed of each worker, in any unit."""
    batch: int = 60
    """The samples of an equal batch."""
    compute_ms: float = 100.0
    """How long the fastest worker takes for an equal batch."""
    iterations: int = 40
    """Iterations of a run."""
    picture: File = None
    """Draw the steps of both runs into this SVG file."""

    def measure(self) -> dict[str, Any]:
        check_file("--picture", self.picture)
        for name, value in (("compute-ms", self.compute_ms), *(("speeds", speed) for speed in self.speeds)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value:g} is out of range: more than 0")
        if self.iterations <= balance.WARM_UP:
            raise ConfigError(f"iterations={self.iterations} is out of range: more than {balance.WARM_UP}")
        setting = balance.Setting(self.speeds, self.batch, self.compute_ms / 1000, self.iterations)
        result, equal, balanced = balance.measure(setting)
        if self.picture is not None:
            panels = {"equal batches": equal, "balanced batches": balanced}
            first = {"equal batches": 1, "balanced batches": balance.WARM_UP}
            Path(self.picture).write_text(drawing.picture(panels, first, 3 * len(self.speeds) * self.compute_ms / 1000))
        columns = {"speeds": "{0}", "balanced": "{1:.1%}", "equal": "{2:.1%}"}
        speeds = ":".join(f"{speed:g}" for speed in self.speeds)
        cells = [form.format(speeds, result.balanced, result.equal) for form in columns.values()]
        print_table(f"share of the summed throughput, {len(self.speeds)} workers", list(columns), [cells], ("speeds",))
        follows = "never" if result.followed_after is None else f"after {result.followed_after} iterations"
        print_plain(
            f"after one worker has become {balance.SLOWER:g} times slower: good again {follows}; {result.again:.1%} "
            f"from iteration {balance.FOLLOWS_WITHIN} on"
        )
        print_plain(f"{balance.PRODUCTION}: {result.production:.2f} times the speed of equal batches")
        return asdict(result)
