"""Every paper that the code cites stands in docs/papers.md, under the short form that the code uses."""

import re
from pathlib import Path

import paceline

ROOT = Path(__file__).parent.parent.parent
CITED = re.compile(r"\b[A-Z][a-z]+(?:\s+et\s+al\.)\s+\d{4}")
BY_NUMBER = re.compile(r"\(00\d, ")
"""A citation by the number that a paper has in a list of somebody's own."""


def test_every_cited_paper_is_listed() -> None:
    listed = set(re.findall(r"^\| ([^|]+ \d{4}) \|", (ROOT / "docs" / "papers.md").read_text(), re.MULTILINE))
    for folder in (Path(paceline.__file__).parent, ROOT / "tests", ROOT / "docs"):
        for path in (path for path in folder.rglob("*") if path.suffix in (".py", ".md", ".txt")):
            assert not BY_NUMBER.findall(path.read_text()), path
            cited = {" ".join(each.split()) for each in CITED.findall(path.read_text())}
            assert cited <= listed, path
