"""The driver's parts get what they need: none takes the driver, and none is made of too much."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import paceline.runtime.live.driver

FOLDER = Path(paceline.runtime.live.driver.__file__).parent
MOST = 25


def classes(source: str) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))


def attributes(of: ast.ClassDef) -> set[str]:
    """What is assigned to `self`, and the fields of a dataclass."""
    fields = {
        node.target.id for node in of.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    own = {
        node.attr
        for node in ast.walk(of)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    return fields | own


def faults(source: str) -> list[str]:
    """The classes that are too large, or know the driver."""
    large = [each.name for each in classes(source) if len(attributes(each)) > MOST]
    known = [each.name for each in classes(source) if attributes(each) & {"driver"}]
    named = [node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and node.id == "Driver"]
    return large + known + named


def test_no_part_knows_the_driver_or_has_too_many_attributes() -> None:
    found = {path.name: faults(path.read_text()) for path in FOLDER.glob("*.py")}
    assert len(found) > 20
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_what_is_wrong_is_found() -> None:
    assert faults("class Part:\n    def __init__(self, driver: Driver) -> None:\n        self.driver = driver\n")
    many = "\n".join(f"        self.a{number} = 0" for number in range(MOST + 1))
    assert faults(f"class Part:\n    def __init__(self) -> None:\n{many}\n")
    assert not faults("class Part:\n    def __init__(self) -> None:\n        self.a = 0\n")
