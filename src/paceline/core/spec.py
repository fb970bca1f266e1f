"""Things that have a text form, for command lines and files: `ssp:staleness=3`, `lognormal:sigma=0.5`.

A `Spec` is a frozen dataclass whose fields are declared with `parameter(default, low=..., high=..., doc=...)`:
one declaration gives the default, the allowed range, the error message and the line in the catalogue.

    text  = name [":" arguments]                 ssp:staleness=3
    argument = key "=" value                     numbers, 1/8, true, none, a:b:c for a list
    value may nest with parentheses              specsync:base=ssp(staleness=3)
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, TypeVar

from paceline.errors import ConfigError

S = TypeVar("S", bound="Spec")


def parameter(default: Any, *, low: float | None = None, high: float | None = None, doc: str, also: str = "") -> Any:
    """Declares a field of a `Spec`: its default, its range (both ends allowed) and what it means.

    `also` is a second name by which a text may call it, where the paper's is a single letter.
    """
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "doc": doc, "also": also})


def option(
    default: Any, *, low: float | None = None, high: float | None = None, choices: tuple[str, ...] = (), doc: str
) -> Any:
    """Declares a parameter that is seldom set: its default is not written in the text form. A text may have
    `choices`."""
    metadata = {"low": low, "high": high, "choices": choices, "doc": doc, "quiet": True}
    return dataclasses.field(default=default, kw_only=True, metadata=metadata)


@dataclass(frozen=True)
class Spec:
    """A named set of parameters with ranges. A value out of range raises `ConfigError`."""

    name: ClassVar[str]
    kind: ClassVar[str]
    origin: ClassVar[str] = ""
    """What stands for the name in the text form if it is not in a catalogue: a file and a class in it."""

    def __post_init__(self) -> None:
        types_of = typing.get_type_hints(type(self))
        for field in text_fields(self):
            label, value = f"{self.name}:{field.name}", getattr(self, field.name)
            check_type(label, value, types_of[field.name], field)
            check_range(label, value, field)

    def __str__(self) -> str:
        given = [(field, getattr(self, field.name)) for field in text_fields(self)]
        told = [(field.name, value) for field, value in given if not (is_quiet(field) and value == field.default)]
        arguments = ",".join(f"{key}={write_value(value)}" for key, value in told if value is not None)
        name = self.origin or self.name
        return f"{name}:{arguments}" if arguments else name


def text_fields(spec: Spec | type[Spec]) -> list[dataclasses.Field[Any]]:
    """Returns the fields that are part of the text form: those declared with `parameter`."""
    return [field for field in dataclasses.fields(spec) if "doc" in field.metadata]


def is_quiet(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("quiet"))


NOUNS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def check_type(label: str, value: Any, wanted: Any, field: dataclasses.Field[Any]) -> None:
    """Refuses a value of another type than its field has, whether it came from a text or from Python."""
    wanted, may_be_none = without_none(wanted)
    if value is None and may_be_none:
        return
    if typing.get_origin(wanted) is tuple:
        if not isinstance(value, tuple) or not value:
            raise ConfigError(f"{label}={write_value(value)} is not a list of one or more values, as 1:2:4")
        for item in value:
            check_type(label, item, typing.get_args(wanted)[0], field)
        return
    allowed = {float: (int, float)}.get(wanted, wanted)
    # A bool is an int to Python, and to nobody else.
    if not isinstance(value, allowed) or (isinstance(value, bool) and wanted is not bool):
        written = write_value(value) if isinstance(value, int | float) else repr(value)
        raise ConfigError(f"{label}={written} is not {NOUNS.get(wanted, 'a value')}{in_brackets(field)}")


def without_none(wanted: Any) -> tuple[Any, bool]:
    """Returns the type a field has when it is not None, and whether it may be None."""
    if typing.get_origin(wanted) in (types.UnionType, typing.Union) and type(None) in typing.get_args(wanted):
        return next(choice for choice in typing.get_args(wanted) if choice is not type(None)), True
    return wanted, False


def check_range(label: str, value: Any, field: dataclasses.Field[Any]) -> None:
    low, high, choices = (field.metadata.get(key) for key in ("low", "high", "choices"))
    if choices and value not in choices:
        raise ConfigError(f"{label}={value} is not one of {', '.join(choices)}")
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        outside = (low is not None and number < low) or (high is not None and number > high)
        if outside or not math.isfinite(number):
            raise ConfigError(f"{label}={write_value(number)} is out of range: {describe_range(field)}")


def in_brackets(field: dataclasses.Field[Any]) -> str:
    """Returns the range in brackets, to end a message with; nothing where there is none."""
    bounded = field.metadata.get("low") is not None or field.metadata.get("high") is not None
    return f" ({describe_range(field)})" if bounded else ""


def describe_range(field: dataclasses.Field[Any]) -> str:
    low, high, choices = (field.metadata.get(key) for key in ("low", "high", "choices"))
    if choices:
        return ", ".join(choices[:-1]) + f" or {choices[-1]}"
    if low is not None and high is not None:
        return f"from {write_value(low)} to {write_value(high)}"
    if low is not None:
        return f"{write_value(low)} or more"
    if high is not None:
        return f"at most {write_value(high)}"
    return "any"


def parse(text: str, catalogue: Mapping[str, type[S]], kind: str) -> S:
    """Reads a text form, looking the name up in `catalogue`."""
    name, arguments = split(text)
    cls = catalogue.get(name)
    if cls is None:
        near = get_close_matches(name, catalogue, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown {kind} {name!r}{hint} (known: {', '.join(catalogue)})")
    return build(cls, arguments)


def build(cls: type[S], arguments: Mapping[str, str]) -> S:
    """Makes a `cls` from texts, refusing unknown names and values that cannot be read."""
    fields = {field.name: field for field in text_fields(cls)}
    types_of = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    called = {field.metadata["also"]: key for key, field in fields.items() if field.metadata.get("also")}
    for given, text in arguments.items():
        key = called.get(given, given)
        if key not in fields:
            known = ", ".join(fields) or "none"
            raise ConfigError(f"{cls.name} has no parameter {key!r} (it has: {known})")
        if key in values:
            raise ConfigError(f"{cls.name}: {given} and {key} are the same, give one of them")
        values[key] = _read(text, types_of[key], f"{cls.name}:{key}", fields[key])
    return cls(**values)


def split(text: str) -> tuple[str, dict[str, str]]:
    """Splits 'ssp:staleness=3', or 'ssp(staleness=3)', into ('ssp', {'staleness': '3'})."""
    text = text.strip()
    head, _, rest = text.partition(":")
    if "(" in head and text.endswith(")"):
        head, _, rest = text[:-1].partition("(")
    name = head.strip()
    if not name:
        raise ConfigError(f"{text!r} has no name: write NAME or NAME:KEY=VALUE,KEY=VALUE")
    arguments: dict[str, str] = {}
    for part in split_commas(rest):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ConfigError(f"{part!r} in {text!r} is not KEY=VALUE")
        if key.strip() in arguments:
            raise ConfigError(f"{key.strip()!r} is given twice in {text!r}")
        arguments[key.strip()] = value.strip()
    return name, arguments


def split_commas(text: str) -> list[str]:
    """Splits a text at the commas that stand in no brackets."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    return parts if text.strip() else []


def _read(text: str, wanted: Any, label: str, field: dataclasses.Field[Any]) -> Any:
    wanted, may_be_none = without_none(wanted)
    if may_be_none and text.lower() == "none":
        return None
    if typing.get_origin(wanted) is tuple:
        return tuple(_read(part, typing.get_args(wanted)[0], label, field) for part in text.split(":"))
    if wanted is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if wanted is str:
        return text
    try:
        if wanted is int:
            return int(text)
        if wanted is float:
            above, slash, below = text.partition("/")
            return float(above) / float(below) if slash else float(text)
    except (ValueError, ZeroDivisionError):
        pass
    raise ConfigError(f"{label}={text} is not {NOUNS.get(wanted, 'a value')}{in_brackets(field)}")


def write_value(value: Any) -> str:
    """Writes a value as it stands in a text form."""
    if isinstance(value, tuple):
        return ":".join(write_value(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)
