"""What mkdocs does besides (`make docs`): README, ARCHITECTURE and CHANGELOG become pages, and links to code its name.

In the repository these documents stand above `docs/`, and links lead from one to the other and to the code. The site
has only documents: links among them are turned, a link to a file of the code becomes the file's path.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ABOVE = {"README.md": "index.md", "ARCHITECTURE.md": "architecture.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the documents that stand above `docs/`."""
    from mkdocs.structure.files import File

    for name, page in ABOVE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    folders = {"policies": None, "decisions": None}
    nav = []
    for entry in config["nav"]:
        title, content = next(iter(entry.items()))
        if isinstance(content, str) and content in folders:
            content = pages_below(content)
        elif isinstance(content, list):
            content = [{each.capitalize(): pages_below(each)} if each in folders else each for each in content]
        nav.append({title: content})
    config["nav"] = nav
    return files


def pages_below(folder: str) -> list[str]:
    return sorted(f"{folder}/{path.name}" for path in (ROOT / "docs" / folder).glob("*.md"))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns the links of a page."""
    source = page.file.src_uri
    above = {new: old for old, new in ABOVE.items()}
    place = ROOT / above[source] if source in above else ROOT / "docs" / source
    return LINK.sub(lambda found: turned(found, place, source), markdown)


def turned(found: re.Match[str], place: Path, source: str) -> str:
    picture, text, link = found.groups()
    path, mark, anchor = link.partition("#")
    anchor = re.sub("-+", "-", anchor)  # as mkdocs makes them
    if re.match(r"\w+:", link):
        return found[0]
    if not path:
        return f"{picture}[{text}](#{anchor})"
    target = (place.parent / path).resolve()
    if not target.exists():
        return found[0]  # mkdocs tells
    inside = target.relative_to(ROOT)
    if str(inside) in ABOVE:
        new = ABOVE[str(inside)]
    elif target.is_file() and inside.parts[0] == "docs":
        new = str(Path(*inside.parts[1:]))
    else:
        return f"{text} (`{inside}`)" if text.strip("`") not in str(inside) else f"`{inside}`"
    up = "../" * (len(Path(source).parts) - 1)
    return f"{picture}[{text}]({up}{new}{mark}{anchor})"
