"""`paceline policies` and `paceline doctor`: what there is, and what is here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import typing
from dataclasses import dataclass

import torch
from rich.table import Table
from rich.text import Text

from paceline import __version__
from paceline.cluster import CATALOGUE as MODELS
from paceline.cluster import Cluster, bundled
from paceline.commands.terminal import console
from paceline.core.spec import describe_range, text_fields, write_value
from paceline.policies import CATALOGUE
from paceline.runtime.live.messaging import checksum
from paceline.runtime.live.storage import shared_memory
from paceline.tensors import fused_kernels
from paceline.workloads import CATALOGUE as WORKLOADS
from paceline.workloads.data_files import find, folders
from paceline.workloads.fashion import ADVICE, FOLDER

COMBINED = [
    (
        "ssp:staleness=3+backup:extra=1",
        "Another policy on each shard: the first on shard 0, the second on shard 1, ...",
    ),
    ("bsp@0,ssp:staleness=3@100", "Another policy after a while: bsp at first, ssp from iteration 100 on."),
    ("FILE.py:CLASS", "A policy of your own, with parameters as usual; see docs/write-your-own-policy.md."),
]


@dataclass(kw_only=True)
class Policies:
    """The catalogue of policies: what each does, its parameters with their ranges, its paper."""

    def main(self) -> int:
        for name, policy in CATALOGUE.items():
            console.print(Text.assemble((name, "bold"), f"  {policy.__doc__}"), soft_wrap=True)
            types = typing.get_type_hints(policy)
            for field in text_fields(policy):
                kind = getattr(types[field.name], "__name__", str(types[field.name]))
                console.print(
                    f"    {field.name}={write_value(field.default).replace('None', 'none')}  "
                    f"{kind}, {describe_range(field)}: {field.metadata['doc']}",
                    soft_wrap=True,
                )
            console.print(Text(f"    {policy.paper}", style="dim"), soft_wrap=True)
        for text, meaning in COMBINED:
            console.print(Text.assemble((text, "bold"), f"  {meaning}"), soft_wrap=True)
        return 0


@dataclass(kw_only=True)
class Scenarios:
    """Who is slow, and when: the models with their parameters, and paceline's own scenarios."""

    def main(self) -> int:
        base = {field.name for field in text_fields(Cluster)}
        for name, model in MODELS.items():
            console.print(Text.assemble((name, "bold"), f"  {model.__doc__}"), soft_wrap=True)
            for field in text_fields(model):
                if model is Cluster or field.name not in base:
                    console.print(
                        f"    {field.name}={field.default}  {describe_range(field)}: {field.metadata['doc']}",
                        soft_wrap=True,
                    )
        console.print("All models have steady's parameters too. Ready-made, with faults and slow links:")
        for name, path in bundled().items():
            about = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
            console.print(Text.assemble((name, "bold"), f"  {about}"), soft_wrap=True)
        return 0


@dataclass(kw_only=True)
class Doctor:
    """Versions, and what is available on this machine."""

    def main(self) -> int:
        table = Table(show_header=False, box=None, pad_edge=False)
        for row in self.rows():
            table.add_row(*row)
        console.print(table)
        return 0

    def rows(self) -> list[tuple[str, str]]:
        shared = shutil.disk_usage(shared_memory.base_folder())
        rows = [("paceline", __version__), ("python", platform.python_version()), ("system", platform.platform())]
        for package in ("torch", "numpy", "msgspec", "safetensors", "tyro", "rich", "networkx", "cryptography"):
            rows.append((package, importlib.metadata.version(package)))
        digits = importlib.util.find_spec("sklearn") is not None
        fashion = find("train-images-idx3-ubyte", folders(FOLDER)) is not None
        left = shared_memory.stale()
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        rows += [
            ("cores", str(os.cpu_count())),
            ("gpus", str(gpus) if gpus else "none (everything works on the CPU)"),
            (
                "shared memory",
                f"{shared_memory.base_folder()}, {shared.free / 1e9:.1f} of {shared.total / 1e9:.1f} GB free",
            ),
            ("virtual runs", "yes"),
            ("live runs", "yes" if hasattr(os, "pidfd_open") else "no: they need Linux 5.3 or newer (pidfd)"),
            ("loops in C", "yes" if fused_kernels.are_compiled() else f"no: {fused_kernels.NOT_COMPILED}"),
            ("checksums in C", "yes" if checksum.are_fast() else "no: messages without keys (--insecure) cost more"),
            ("runs on ray", "yes" if importlib.util.find_spec("ray") else "no: pip install 'paceline[ray]'"),
            ("fashion data", "yes" if fashion else f"no: {ADVICE}"),
            ("digits data", "yes" if digits else "no: pip install 'paceline[data]'"),
            ("workloads", ", ".join(WORKLOADS)),
            ("left by killed runs", f"{', '.join(map(str, left))}: removed at the next" if left else "nothing"),
        ]
        return rows
