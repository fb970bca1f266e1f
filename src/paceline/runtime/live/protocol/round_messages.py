"""The messages about rounds of local steps whose length is planned (`core/control/round_planner.py`).

worker -> driver     Begun
driver -> worker     Planned
"""

from __future__ import annotations

from msgspec import Struct

from paceline.core.control.round_planner import EndRound, RoundBegun


class Begun(Struct, frozen=True, tag="RoundBegun"):
    """A worker begins a round."""

    message: RoundBegun


class Planned(Struct, frozen=True, tag="EndRound"):
    """When a worker is to end its round."""

    order: EndRound
