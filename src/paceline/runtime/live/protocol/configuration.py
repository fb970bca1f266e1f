"""The configuration of a live run, which each of its processes is given at its start, and where listeners are."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from paceline.core.local_steps import LocalSteps
from paceline.core.messages import Members


class Endpoint(Struct, frozen=True):
    """Where an incarnation of a server, or of a peer, can be reached (`storage/endpoints.py`)."""

    incarnation: int
    folder: str = ""
    """Its run folder, for processes of its host; "" if it is the reader's own."""
    nonce: str = ""
    """The random text in that folder: a process that can read it there is on the same host."""
    address: str = ""
    """tcp://HOST:PORT for processes of other hosts; "" in a run on one host."""
    key: str = ""
    """Its public key; "" without keys."""
    device: str = ""
    """The device in whose memory it steps its parameters (`storage/device_segments.py`); "" on the CPU."""
    common: bool = False
    """Whether workers read its parameters where it steps them: the segment `shared_memory.COMMON`."""


class ModelDevice(Struct, frozen=True):
    """What a worker says of the device that its model is on."""

    name: str = ""
    """The device, if it holds the whole model and its memory can be shared."""
    problem: str = ""
    """Why the memory of the device cannot be shared."""


class ServerDevice(Struct, frozen=True):
    """What a server is told of the device that it is to step on."""

    name: str = ""
    """The device, if it can be used; "" for the CPU."""
    probe: str = ""
    """A file of the run's folder that leads to a segment of the device, made by a worker: whether it can be mapped."""


class MultihostOptions(Struct, frozen=True):
    """How the processes of a run on several hosts listen, and what they send."""

    host: str
    """The address of the interface to listen on, or 0.0.0.0."""
    advertise: str
    """The address to advertise; "" for `host`."""
    ports: tuple[int, int] = (0, 0)
    """The first and the last port that may be used; (0, 0) leaves it to the system."""
    keys: bool = True
    """If false, whoever reaches a port is believed (--insecure)."""
    wire: str = "float32"
    """The precision of floats on the wire (`tensors/wire_precision.py`)."""
    shared_memory: bool = True
    """Workers on a server's host reach it by shared memory; False: by TCP too, so that TCP can be measured."""


class LiveConfig(Struct, frozen=True):
    """What every process of a run reads at its start, from a file of the run's folder."""

    members: Members
    seed: int
    cluster: dict[str, Any] | None
    """The scenario whose slowdowns, slow links and faults are injected, as a table (cluster/files.py)."""
    output: str
    """The folder for traces."""
    slicing: str
    """How the parameters are cut over the servers (`Layout.slicing`)."""
    policy: str | None = None
    """The policy that takes precedence over the script's, if any."""
    keeps_state: bool = False
    """Whether peers write their optimizer's state at the end, for a checkpoint."""
    run: str = ""
    """A unique name, by which messages of another run are recognized."""
    multihost: MultihostOptions | None = None
    """Set if the run is on several hosts."""
    guest: bool = False
    """Whether the driver is on another host: none of its texts becomes a path or code (`driver_texts.py`)."""
    servers_on: str = "auto"
    """Where servers, or peers, have the parameters: "cpu", "gpu", or "auto", where the models are."""
    local_steps: LocalSteps | None = None
    """The local steps that take precedence over the script's, if any."""
    own_policy: str | None = None
    """The policy of this host's own command line, which may be in a file even for a guest."""
