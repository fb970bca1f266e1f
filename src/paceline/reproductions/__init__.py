"""The papers' experiments, done again: `paceline reproduce NAME`. One experiment a file, an essay on top.

To add one: a file with a `Reproduction` (base.py), and its class in `CATALOGUE`.
"""

from __future__ import annotations

from difflib import get_close_matches

from paceline.errors import ConfigError
from paceline.reproductions.async_local_sgd import AsyncLocalSGD
from paceline.reproductions.backup_choice import BackupChoice
from paceline.reproductions.backup_staleness import BackupStaleness
from paceline.reproductions.backup_sync_async import BackupSyncAsync
from paceline.reproductions.base import Claim, Findings, Reproduction
from paceline.reproductions.diloco import DiLoCo
from paceline.reproductions.elasticbsp import ElasticBSPs
from paceline.reproductions.fluentps_lazy import FluentPSLazy
from paceline.reproductions.fluentps_overlap import FluentPSOverlap
from paceline.reproductions.fluentps_pssp import FluentPSPSSP
from paceline.reproductions.hop_backup import HopBackup
from paceline.reproductions.hop_graphs import HopGraphs
from paceline.reproductions.hop_skip import HopSkip
from paceline.reproductions.hop_staleness import HopStaleness
from paceline.reproductions.specsync import SpecSyncSpeed
from paceline.reproductions.specsync_waiting import SpecSyncWaiting
from paceline.reproductions.zipline_search import ZipLineSearch

CATALOGUE: dict[str, type[Reproduction]] = {
    reproduction.name: reproduction
    for reproduction in (
        *(BackupChoice, BackupStaleness, BackupSyncAsync, FluentPSOverlap, FluentPSPSSP, FluentPSLazy),
        *(ZipLineSearch, ElasticBSPs, SpecSyncWaiting, SpecSyncSpeed, HopBackup, HopStaleness, HopSkip, HopGraphs),
        *(DiLoCo, AsyncLocalSGD),
    )
}


def find(name: str, device: str = "cpu") -> Reproduction:
    """Returns the reproduction of this name, at its full size, with gradients computed on this device."""
    if name not in CATALOGUE:
        near = get_close_matches(name, CATALOGUE, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown reproduction {name!r}{hint} (known: {', '.join(CATALOGUE)})")
    return CATALOGUE[name](device=device)


__all__ = ["CATALOGUE", "Claim", "Findings", "Reproduction", "find"]
