"""Small pieces of text and HTML. Everything that comes from outside goes through `text` or `tag`."""

from __future__ import annotations

from html import escape

DASH = "–"
LONG_NAME = 24
RUN_COLOURS = 8
"""How many colours style.css has for runs; later runs take them again, dashed."""


def text(value: object) -> str:
    """Escaped, for content and for quoted attributes alike."""
    return escape(str(value), quote=True)


def tag(name: str, content: str = "", **attributes: object) -> str:
    """An element around markup. `class_` is class, `data_run` is data-run; None leaves an attribute out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{content}</{name}>"


def run_class(index: int) -> str:
    """The colour of a run, the same in every chart and table."""
    return f"r{index % RUN_COLOURS}" + (" again" if index >= RUN_COLOURS else "")


def swatch(index: int) -> str:
    return f'<i class="swatch {run_class(index)}"></i>'


def run_head(index: int, name: str, scope: str) -> str:
    """The heading of a row or column: the run's colour and name, which may break after a colon or a comma.

    The style lets every name break on a phone, and long ones anywhere.
    """
    words = text(name).replace(":", ":<wbr>").replace(",", ",<wbr>")
    return tag("th", swatch(index) + words, scope=scope, class_="long" if len(name) > LONG_NAME else None)


def seconds(value: float) -> str:
    """'412 ms', '3.20 s', '12.3 s', '845 s', '1 h 12 min'."""
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
    """'12 400', with narrow spaces; one decimal if it is not whole."""
    digits = f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    return digits.replace(",", "\u202f")


def share(value: float) -> str:
    """'0 %', '3.2 %', '67 %'."""
    percent = 100 * value
    if 0 < percent < 0.05:
        return "<0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def megabytes(value: float) -> str:
    """Millions of bytes: '0.0052', '3.20', '45.1', '1 240'."""
    size = value / 1e6
    if size < 1:
        return f"{size:.2g}"
    return f"{size:.2f}" if size < 10 else f"{size:.1f}" if size < 100 else count(round(size))


def plural(number: int, noun: str) -> str:
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"
