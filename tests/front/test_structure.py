"""How the code is built: no part holds its whole owner, no class has too many attributes, no file is too long."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "paceline"
RUNTIME = PACKAGE / "runtime"
MOST_ATTRIBUTES = 25
MOST_LINES = 400


def classes(sources: dict[str, str]) -> Iterator[tuple[str, ast.ClassDef]]:
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                yield path, node


def attributes(cls: ast.ClassDef) -> set[str]:
    """The names that the class's methods assign on `self`."""
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def constructor_types(cls: ast.ClassDef) -> set[str]:
    """The class names in the annotations of what the constructor takes, or of a dataclass's fields."""
    found: list[ast.expr] = [item.annotation for item in cls.body if isinstance(item, ast.AnnAssign)]
    for item in cls.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            found = [
                each.annotation for each in (*item.args.args, *item.args.kwonlyargs) if each.annotation is not None
            ]
            break
    return {name for annotation in found for name in re.findall(r"\w+", ast.unparse(annotation))}


def made_with_self(cls: ast.ClassDef) -> set[str]:
    """The classes whose constructors the class's methods call with `self`."""
    made = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(isinstance(each, ast.Name) and each.id == "self" for each in given):
                made.add(ast.unparse(node.func).rpartition(".")[2])
    return made


def parts_that_hold_their_owner(sources: dict[str, str]) -> list[str]:
    """The parts that are given, as it is, the object that makes them; a `Protocol` between the two is no owner."""
    every = list(classes(sources))
    takes = {part.name: constructor_types(part) for _, part in every}
    return [
        f"{path}: {owner.name} gives itself to {part}"
        for path, owner in every
        for part in made_with_self(owner)
        if owner.name in takes.get(part, ())
    ]


def sources_below(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(folder.rglob("*.py"))}


def test_no_part_holds_its_whole_owner() -> None:
    assert parts_that_hold_their_owner(sources_below(RUNTIME)) == []


@pytest.mark.parametrize("owner", ["Driver", "LiveWorker", "LivePeer", "LiveServer", "Agent"])
def test_no_constructor_of_the_runtime_takes_a_whole_process(owner: str) -> None:
    everywhere = list(classes(sources_below(RUNTIME)))
    assert owner in {cls.name for _, cls in everywhere}, "it has another name now: say it here"
    assert [f"{path}: {cls.name}" for path, cls in everywhere if owner in constructor_types(cls)] == []


def test_classes_have_few_attributes() -> None:
    counts = {f"{path}: {cls.name}": len(attributes(cls)) for path, cls in classes(sources_below(RUNTIME))}
    assert {name: count for name, count in counts.items() if count > MOST_ATTRIBUTES} == {}


def test_no_file_is_long() -> None:
    lengths = {path: source.count("\n") for path, source in sources_below(PACKAGE).items()}
    assert {path: length for path, length in lengths.items() if length > MOST_LINES} == {}


def prints(source: str) -> list[str]:
    """The functions that call `print`."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    calls = {each.name: [node for node in ast.walk(each) if isinstance(node, ast.Call)] for each in functions}
    return [name for name, made in calls.items() if any(ast.unparse(call.func) == "print" for call in made)]


def test_the_library_logs_and_the_command_line_prints() -> None:
    """A process that ends prints why, as Python does; the driver of a script prints what its workers print."""
    programs = [PACKAGE / "cli.py", *(PACKAGE / "commands").rglob("*.py"), *(PACKAGE / "bench").rglob("*.py")]
    library = {path: prints(path.read_text()) for path in set(PACKAGE.rglob("*.py")) - set(programs)}
    assert {path.stem: found for path, found in library.items() if found} == {
        "process_setup": ["run_worker", "print_failure"],
        "worker_output": ["print_error"],
    }


def test_these_tests_can_fail() -> None:
    assert prints("def f():\n    return 1 if print(2) else 3\n\ndef g():\n    log.print(4)\n") == ["f"]
    source = """
class Part:
    def __init__(self, owner: Owner) -> None:
        self.owner = owner

class Modest:
    def __init__(self, say: Speaker) -> None:
        self.say = say

class Owner:
    def __init__(self) -> None:
        self.a, self.b = Part(self), Modest(self)
        self.c: int = 1
"""
    assert parts_that_hold_their_owner({"x.py": source}) == ["x.py: Owner gives itself to Part"]
    assert {cls.name: len(attributes(cls)) for _, cls in classes({"x.py": source})} == {
        "Part": 1,
        "Modest": 1,
        "Owner": 3,
    }
