"""Scenarios as text and as TOML, and back: what a file says, what a command line says, what a live run's processes
are told.

    model = "random-slowdown"        # any model with its parameters, as in the text form
    factor = 6
    compute_s = 0.02

    [[slowdown]]                     # more of them; the factors multiply
    model = "one-slow"
    factor = 3
    from_iteration = 100

    [[link]]                         # workers whose own connection is slow
    workers = [2, 3]
    bandwidth = 1e6

    [[edge]]                         # two peers whose connection is slow
    between = [0, 4]
    latency_s = 0.05

    [[fault]]
    kind = "crash"                   # crash, leave, join, pause (for_s), restart (for_s)
    worker = 2
    at_s = 3.0                       # or at_iteration = 40

    [[servers]]                      # another number of servers, in a live run
    count = 3
    at_s = 5.0                       # or at_iteration = 100

    [costs]                          # what exchanges cost (cluster/costs.py)
    cores = 2

docs/scenarios.md has every key. A short name means one of paceline's own files (`scenarios/`), whose top-level keys
may be changed as in `noisy-neighbours:compute_s=0.02`.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from paceline.cluster import faults_and_links
from paceline.cluster.costs import Costs, MeasuredWorker
from paceline.cluster.faults_and_links import Edge, Fault, Link, Resize
from paceline.cluster.model_catalogue import CATALOGUE
from paceline.cluster.models import Cluster, Slowdown
from paceline.core import spec
from paceline.errors import ConfigError

FOLDER = Path(__file__).parent / "scenarios"
TABLES = ("slowdown", "link", "edge", "fault", "servers", "worker")
COSTS = "costs"
READ_AS: tuple[tuple[str, str, type[Struct]], ...] = (
    ("faults", "fault", Fault), ("resizes", "servers", Resize), ("links", "link", Link), ("edges", "edge", Edge),
    ("measured", "worker", MeasuredWorker),
)  # fmt: skip
"""The fields of a cluster that are lists of tables: (field, table, what each is read as)."""
OF_ALL = tuple(field.name for field in spec.text_fields(Cluster))
"""The keys that every model has: they describe the cluster, not who is slower by how much."""


class When(Struct, frozen=True):
    """The keys of a [[slowdown]] that are not its model's."""

    workers: tuple[int, ...] | None = None
    from_iteration: int = 0
    until_iteration: int | None = None


def bundled() -> dict[str, Path]:
    """Returns paceline's own scenarios by short name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def load(cluster: str | Cluster) -> Cluster:
    """Reads a cluster from its text form, a TOML file or a short name; a cluster object is returned as it is."""
    if isinstance(cluster, Cluster):
        return cluster
    if not isinstance(cluster, str):
        raise ConfigError(f"a cluster is a text like 'one-slow:factor=4', a .toml file or a Cluster, got {cluster!r}")
    if cluster.endswith(".toml"):
        return read(Path(cluster))
    name, arguments = spec.split(cluster)
    own = bundled()
    if name in CATALOGUE:
        return spec.build(CATALOGUE[name], arguments)
    if name in own:
        return read(own[name], arguments)
    near = get_close_matches(name, [*CATALOGUE, *own], n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown cluster {name!r}{hint} (models: {', '.join(CATALOGUE)}; scenarios: {', '.join(own)})")


def read(path: Path, changes: Mapping[str, str] | None = None) -> Cluster:
    """Reads a cluster from a TOML file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the scenario {str(path)!r}: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the scenario {str(path)!r} is not TOML: {error}") from None
    try:
        cluster = from_table({**table, **(changes or {})}, path.parent)
        return dataclasses.replace(cluster, source=f"the scenario {str(path)!r}")
    except ConfigError as error:
        raise ConfigError(f"the scenario {str(path)!r}: {error}") from None


def from_table(table: Mapping[str, Any], folder: Path | None = None) -> Cluster:
    """Makes a cluster from a table as in a TOML file. Files it names are looked for in `folder`."""
    rest = dict(table)
    costs = rest.pop(COSTS, None)
    lists = {name: _tables(rest.pop(name, []), name) for name in TABLES}
    model = _model(rest, folder)
    entries: dict[str, Any] = {
        field: tuple(faults_and_links.read(kind, each, f"[[{name}]] {n}") for n, each in enumerate(lists[name], 1))
        for field, name, kind in READ_AS
    }
    also = tuple(_slowdown(each, n, folder) for n, each in enumerate(lists["slowdown"], 1))
    if lists["worker"] and model.name != "measured":
        raise ConfigError(f"[[worker]] is for the model measured, not for {model.name}")
    if costs is not None:
        if not isinstance(costs, dict):
            raise ConfigError("costs must be a table: write [costs] above it")
        entries["costs"] = faults_and_links.read(Costs, costs, "[costs]")
    return dataclasses.replace(model, also=also, **entries)


def to_table(cluster: Cluster) -> dict[str, Any]:
    """Returns the table that `from_table` reads, to send it to the processes of a live run."""
    table: dict[str, Any] = {"model": cluster.name}
    for field in spec.text_fields(cluster):
        value = getattr(cluster, field.name)
        if value is not None:
            table[field.name] = list(value) if isinstance(value, tuple) else value
    table |= {name: list(msgspec.to_builtins(getattr(cluster, field))) for field, name, _ in READ_AS}
    if cluster.costs is not None:
        table[COSTS] = {key: value for key, value in msgspec.to_builtins(cluster.costs).items() if value is not None}
    table["slowdown"] = []
    for slowdown in cluster.also:
        when = When(slowdown.workers, slowdown.from_iteration, slowdown.until_iteration)
        model = {key: value for key, value in to_table(slowdown.model).items() if key not in (*TABLES, *OF_ALL, COSTS)}
        table["slowdown"].append({**model, **msgspec.to_builtins(when)})
    for each in table["fault"] + table["servers"] + table["link"] + table["edge"] + table["slowdown"]:
        for key in [key for key, value in each.items() if value is None or value == math.inf]:
            del each[key]
    return table


def _tables(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ConfigError(f"{name} must be a list of tables: write [[{name}]] above each")
    return value


def _model(table: dict[str, Any], folder: Path | None) -> Cluster:
    name = table.pop("model", "steady")
    if not isinstance(name, str) or name not in CATALOGUE:
        raise ConfigError(f"unknown cluster {name!r} (known: {', '.join(CATALOGUE)})")
    empty = next((key for key, value in table.items() if value == []), None)
    if empty is not None:
        raise ConfigError(f"{empty} is an empty list: give one value or more")
    if folder is not None and isinstance(table.get("file"), str):
        table["file"] = str((folder / table["file"]).resolve())
    return spec.build(CATALOGUE[name], {key: _as_text(value) for key, value in table.items()})


def _slowdown(table: Mapping[str, Any], number: int, folder: Path | None) -> Slowdown:
    label = f"[[slowdown]] {number}"
    keys = When.__struct_fields__
    when = faults_and_links.read(When, {key: value for key, value in table.items() if key in keys}, label)
    useless = next((key for key in table if key in OF_ALL), None)
    if useless is not None:
        raise ConfigError(f"{label}: {useless} is of the whole scenario, write it above the tables")
    try:
        model = _model({key: value for key, value in table.items() if key not in keys}, folder)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None
    return Slowdown(model, when.workers, when.from_iteration, when.until_iteration)


def _as_text(value: object) -> str:
    if isinstance(value, list):
        return ":".join(_as_text(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
