"""Where servers, or peers, have the parameters: on the GPUs where the models are, or on the CPU; why, in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.configuration import ModelDevice, ServerDevice
from paceline.runtime.live.trainer.device_report import PEERS_ON_DEVICES, probe_name


@dataclass(eq=False)
class ServerPlacement:
    """Chooses a device for each server, or none, when all workers have said where their models are."""

    wanted: str
    """"cpu", "gpu", or "auto": where the models are."""
    obstacle: str
    """Why this run must have its servers on the CPU, if it must."""
    described: Mapping[tuple[int, int], wire.Describe]
    say: Callable[[str], None]
    devices: tuple[str, ...] = ()
    """The devices that servers are spread over; none if they step on the CPU."""
    probe: str = ""
    """The file with worker 0's probe."""

    def choose_for_peers(self, live: Iterable[tuple[int, int]], folder: Path) -> None:
        """Chooses for peers, which all have theirs on devices or none, and leaves word in the run's folder."""
        self.choose(live, "peers")
        if self.devices:
            (folder / PEERS_ON_DEVICES).touch(0o600)

    def choose(self, live: Iterable[tuple[int, int]], who: str = "servers") -> None:
        """Chooses, from what these workers have said."""
        if self.wanted == "cpu":
            return
        said = [self.described[process] for process in sorted(live) if process in self.described]
        devices = tuple(dict.fromkeys(each.model_on.name for each in said if each.model_on.name))
        why = self._why_not(said, mixed=self.wanted == "gpu" and who == "servers")
        if not devices and not why:
            if self.wanted == "gpu":
                self.say(f"{who} on the CPU: no model is on a GPU")
        elif why:
            self.say(f"{who} on the CPU: {why}")
        else:
            self.devices = devices
            self.probe = probe_name(said[0].rank, said[0].incarnation) if said[0].model_on.name else ""
            self.say(f"{who} on {', '.join(devices)}, where the models are (--servers-on cpu has them on the CPU)")

    def _why_not(self, said: list[wire.Describe], mixed: bool) -> str:
        """Returns why the devices are not used; `mixed`: some models may be elsewhere."""
        on_device = [each for each in said if each.model_on != ModelDevice()]
        if not on_device:
            return ""
        for each in said:
            if problem := each.model_on.problem:
                return f"the memory of worker {each.rank}'s device cannot be shared: {problem}"
        if self.obstacle:
            return self.obstacle
        elsewhere = [each.rank for each in said if not each.model_on.name]
        if elsewhere and not mixed:
            return f"the model of worker {elsewhere[0]} is not on one GPU"
        return ""

    def device_for(self, shard: int, begun: bool) -> ServerDevice:
        """Returns what this server is told of its device. Probes are there until the run has begun."""
        if not self.devices:
            return ServerDevice()
        return ServerDevice(self.devices[shard % len(self.devices)], "" if begun else self.probe)

    def take_problem(self, shard: int, problem: str) -> None:
        """A server says that it steps on the CPU, and why."""
        self.say(f"server {shard} on the CPU: {problem}")
