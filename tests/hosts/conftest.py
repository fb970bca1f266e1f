"""Tests with several hosts: skipped where namespaces cannot be made, and watched for what they leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.hosts import netns
from tests.live.conftest import nothing_left_behind  # noqa: F401  (the same guard)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    own = [item for item in items if item.path.is_relative_to(here) and needs_namespaces(item)]
    if own and (reason := netns.missing()) is not None:
        for item in own:
            item.add_marker(pytest.mark.skip(reason=reason))


def needs_namespaces(item: pytest.Item) -> bool:
    return not getattr(getattr(item, "module", None), "ON_THIS_MACHINE", False)
