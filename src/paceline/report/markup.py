"""Small pieces of text and HTML. Everything that comes from outside goes through `text` or `tag`."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

DASH = "–"
LONG_NAME = 24
RUN_COLOURS = 8
"""How many colours style.css has for runs; later runs take them again, dashed."""


def text(value: object) -> str:
    """Escapes a text, for content and for quoted attributes alike."""
    return escape(str(value), quote=True)


def tag(name: str, content: str = "", **attributes: object) -> str:
    """Makes an element around markup. `class_` is class, `data_run` is data-run; None leaves an attribute out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{content}</{name}>"


def run_class(index: int) -> str:
    """Returns the colour of a run, the same in every chart and table."""
    return f"r{index % RUN_COLOURS}" + (" again" if index >= RUN_COLOURS else "")


def swatch(index: int) -> str:
    return f'<i class="swatch {run_class(index)}"></i>'


def run_head(index: int, name: str, scope: str) -> str:
    """Makes the heading of a row or column: the run's colour and name, which may break after a colon or a comma.

    The style lets every name break on a phone, and long ones anywhere.
    """
    words = text(name).replace(":", ":<wbr>").replace(",", ",<wbr>")
    return tag("th", swatch(index) + words, scope=scope, class_="long" if len(name) > LONG_NAME else None)


def headings(names: Iterable[str]) -> str:
    """Makes the headings of columns."""
    return "".join(tag("th", text(name), scope="col") for name in names)


def row(name: str, cells: Iterable[str]) -> str:
    """Makes a row of a table from its heading and its cells, both markup."""
    return tag("tr", name + "".join(cells))


def named_row(name: str, cells: Iterable[str]) -> str:
    return row(tag("th", text(name), scope="row"), cells)


def table(head: str, rows: Iterable[str], class_: str) -> str:
    """Makes a table that scrolls by itself if it is too wide for the window; the page does not."""
    top = tag("thead", tag("tr", head)) if head else ""
    return tag("div", tag("table", top + tag("tbody", "".join(rows)), class_=class_), class_="scroll", tabindex="0")


def picture(shapes: str, width: int, height: int, label: str, **attributes: object) -> str:
    """Makes a drawing that is stretched to the space there is."""
    box = f"0 0 {width} {height}"
    return tag("svg", shapes, viewBox=box, preserveAspectRatio="none", role="img", aria_label=label, **attributes)


def y_ticks(places: Iterable[tuple[float, str]]) -> str:
    """Makes the labels beside a vertical axis, each at its place between 0 and 1."""
    known = list(places)
    ticks = [tag("span", text(words), style=f"bottom:{100 * place:.2f}%") for place, words in known]
    widest = max((words for _, words in known), key=len)
    return tag("div", tag("span", text(widest), class_="widest") + "".join(ticks), class_="y")


def x_ticks(places: Iterable[tuple[float, str]]) -> str:
    """Makes the labels below a horizontal axis. The first and last are kept inside it."""
    ticks = []
    for place, words in places:
        edge = "first" if place < 0.01 else "last" if place > 0.97 else None
        ticks.append(tag("span", text(words), style=f"left:{100 * place:.2f}%", class_=edge))
    return tag("div", "".join(ticks), class_="x")


def seconds(value: float) -> str:
    """Writes '412 ms', '3.20 s', '12.3 s', '845 s', '1 h 12 min'."""
    size = abs(value)
    if size == 0:
        return "0 s"
    if size < 0.001:
        return f"{value * 1e6:.3g} µs"
    if size < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if size < 9.995:
        return f"{value:.2f} s"
    if size < 99.95:
        return f"{value:.1f} s"
    if size < 5999.5:
        return f"{value:.0f} s"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours} h {minutes} min"


def count(value: float) -> str:
    """Writes '12 400', with narrow spaces, and one decimal if the number is not whole."""
    digits = f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    return digits.replace(",", "\u202f")


def share(value: float) -> str:
    """Writes '0 %', '3.2 %', '67 %'."""
    percent = 100 * value
    if 0 < percent < 0.05:
        return "<0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def megabytes(value: float) -> str:
    """Writes millions of bytes: '0.0052', '3.20', '45.1', '1 240'."""
    size = value / 1e6
    if size < 1:
        return f"{size:.2g}"
    return f"{size:.2f}" if size < 10 else f"{size:.1f}" if size < 100 else count(round(size))


def plural(number: int, noun: str) -> str:
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"
