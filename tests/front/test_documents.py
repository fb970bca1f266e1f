"""The documents: short paragraphs, links that lead somewhere, commands that can be read, files that exist."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from paceline import cli
from paceline.core.actions import Action
from paceline.core.events import Event
from paceline.core.messages import Message
from tests import forked

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".sh"))
FOLDERS = ("src", "tests", "benchmarks", "examples", "docs")
"""The folders whose files documents name."""

COMMAND = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:(?:torchrun|srun) .*-m |[\w./]*/)?paceline (.+)")
PATH = re.compile(r"(?<![\w./-])(?:\.\./)*((?:[\w-]+/)+[\w-]+\.(?:py|pyi|c|cpp|toml|md|sh|txt|css|js))\b")
FILE = re.compile(r"(?<![\w./-])([\w-]+\.py)\b")
FOLDER = re.compile(rf"\b(?:{'|'.join(FOLDERS)})/[\w/-]+/(?!\w)")
USERS = {"train.py", "mine.py", "sprints.py", "FILE.py", "SCRIPT.py"}
"""The names of files that a user writes."""
A_MACHINES_PATH = re.compile(r"(?<![\w.])/(?:home|root|work|tmp|mnt|srv|opt|Users)/\w+")
MARKDOWN = MarkdownIt("commonmark").enable("table")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def words(text: Token) -> int:
    """How many words a reader sees: neither the addresses of links nor the texts of pictures count."""
    seen = " ".join(part.content for part in text.children or () if part.type in ("text", "code_inline"))
    return len(seen.split())


def paragraphs(text: str) -> Iterator[Token]:
    tokens = MARKDOWN.parse(text)
    for before, token in itertools.pairwise(tokens):
        if before.type == "paragraph_open":
            yield token


def links(text: str) -> Iterator[str]:
    for token in MARKDOWN.parse(text):
        for part in token.children or ():
            if part.type in ("link_open", "image"):
                yield str(part.attrs.get("href", part.attrs.get("src")))


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings."""
    tokens = MARKDOWN.parse(text)
    titles = [token.content for before, token in itertools.pairwise(tokens) if before.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path, text: str) -> list[str]:
    broken = []
    for link in links(text):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if re.match(r"\w+:", link):
            continue
        titles = text if not file else target.read_text() if target.suffix == ".md" and target.exists() else ""
        if not target.exists() or (anchor and anchor not in anchors(titles)):
            broken.append(link)
    return broken


def code(text: str) -> Iterator[tuple[str, bool]]:
    """Each line of code, with whether it is whole: inline code may be a part of a command."""
    for token in MARKDOWN.parse(text):
        if token.type in ("fence", "code_block"):
            yield from ((line, True) for line in token.content.replace("\\\n", " ").splitlines())
        yield from ((part.content, False) for part in token.children or () if part.type == "code_inline")


@functools.cache
def options_of(command: str) -> set[str]:
    """The options that `paceline COMMAND --help` tells of."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), pytest.raises(SystemExit):
        cli.run([*command.split(), "--help"])
    return {*re.findall(r"(--[a-z][a-z-]*)", told.getvalue()), "--help"}


def wrong_commands(lines: Iterator[tuple[str, bool]]) -> list[str]:
    wrong = []
    for line, whole in lines:
        found = COMMAND.match(line.strip())
        if found is None or found[1].startswith(("COMMAND", "--help")):
            continue
        arguments = shlex.split(found[1], comments=True)
        own, _ = cli.split_script(arguments)
        try:
            known = options_of(cli.name_of(own))
            if unknown := [each for each in own if each.startswith("--") and each.partition("=")[0] not in known]:
                wrong.append(f"{line}: {unknown}")
            elif whole and "--help" not in own:
                cli.read(own)
        except cli.ConfigError as error:
            wrong.append(f"{line}: {error}")
    return wrong


@functools.cache
def files() -> frozenset[str]:
    """Every file of the repository, also under each of the shorter paths that end in it."""
    all_files = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return frozenset("/".join(path.parts[start:]) for path in all_files for start in range(len(path.parts)))


def missing_files(text: str) -> list[str]:
    """The files that code and links name and that are not there; what a run or a user writes is not looked for."""
    named = {path for line, _ in code(text) for path in PATH.findall(line)}
    named |= {file for line, whole in code(text) if not whole for file in FILE.findall(line)} - USERS
    named |= {path.rstrip("/") for line, _ in code(text) for path in FOLDER.findall(line)}
    numbers = {f"docs/decisions/{int(number):04}" for number in re.findall(r"[Dd]ecision (\d+)", text)}
    decisions = {each[:19] for each in files() if each.startswith("docs/decisions/")}
    outside = ("demo/", "runs/", "ns/", "durable/", "DIR/")
    missing = {path for path in named if not path.startswith(outside) and path not in files()}
    return sorted(missing | (numbers - decisions))


def test_no_paragraph_of_the_readme_is_long() -> None:
    long = [token.content for token in paragraphs((ROOT / "README.md").read_text()) if words(token) > 60]
    assert not long


def test_every_folder_of_the_package_is_in_the_architecture() -> None:
    tree = (ROOT / "ARCHITECTURE.md").read_text().split("```")[1]
    package = ROOT / "src" / "paceline"
    folders = {path.parent.name for path in package.rglob("__init__.py")} - {"paceline"}
    named = {line.split("/")[0].split()[0] for line in tree.splitlines() if line.startswith("  ")}
    assert folders <= named
    assert set(re.findall(r"^ +(\w+)/ ", tree, re.MULTILINE)) <= folders


def test_every_event_action_and_message_is_in_the_architecture() -> None:
    contract = (ROOT / "ARCHITECTURE.md").read_text().split("## The contract")[1].split("\n## ")[0]
    kinds = {kind.__name__ for union in (Event, Action, Message) for kind in get_args(union)}
    assert kinds - set(re.findall(r"`(\w+)`", contract)) == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_link_leads_somewhere(path: Path) -> None:
    assert broken_links(path, path.read_text()) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_file_that_a_document_names_exists(path: Path) -> None:
    assert missing_files(path.read_text()) == []


def test_the_options_of_every_command_line_exist() -> None:
    wrong = {name(path): wrong_commands(code(path.read_text())) for path in DOCUMENTS}
    wrong |= {name(path): wrong_commands((line, True) for line in path.read_text().splitlines()) for path in EXAMPLES}
    assert {path: lines for path, lines in wrong.items() if lines} == {}


@pytest.mark.parametrize("path", [*DOCUMENTS, *EXAMPLES], ids=name)
def test_no_document_has_a_path_of_a_machine(path: Path) -> None:
    assert A_MACHINES_PATH.findall(path.read_text()) == []


def test_what_is_wrong_is_found() -> None:
    """The checks above find what they look for."""
    assert [words(token) for token in paragraphs("a [b c](d/e.md) `f g` ![h](i.png)\n\n- j k")] == [5, 2]
    text = "# A title: `x`\n[a](#a-title-x) [b](#b) [c](README.md) [d](gone.md) [e](README.md#gone) [f](https://x.org)"
    assert broken_links(ROOT / "README.md", text) == ["#b", "gone.md", "README.md#gone"]
    lines = [
        "$ paceline run --workers 2 train.py --lr 1",
        "paceline ron x.py",
        "$ paceline run --wirkers 2 train.py",
        "$ torchrun --nnodes 3 -m paceline host --works 4 x.py",
        "paceline servers runs/mine",
        "paceline is a word",
    ]
    assert len(wrong_commands((line, True) for line in lines)) == 5
    assert wrong_commands(iter([("paceline servers", False), ("paceline run --servers", False)])) == []
    named = "`core/shard.py` `core/gone.py` `src/paceline/core/shard.py` `src/gone/` `train.py` `gone.py`"
    assert missing_files(f"{named} decision 9999, decision 4") == [
        "core/gone.py",
        "docs/decisions/9999",
        "gone.py",
        "src/gone",
    ]
    assert A_MACHINES_PATH.findall("see /home/me/x, not ~/x, /dev/shm or https://a.b/work/x") == ["/home/me"]


def test_the_script_of_the_readme_trains_alone_and_together(tmp_path: Path) -> None:
    found = re.search(r"```python train\.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "train.py").write_text(found[1])
    together = ["-m", "paceline", "run", "--workers", "2", "--servers", "2", "train.py"]
    for command, times in ((["train.py"], 1), (together, 2)):
        done = forked.run(command, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        losses = [float(loss) for loss in re.findall(r"loss (\d\S+)", done.stdout)]
        assert len(losses) == times, done.stdout
        assert max(losses) < 1.0
