"""A policy of your own, from a file: `./mine.py:MyPolicy` or `./mine.py:MyPolicy:bound=2`.

The file is run once in each process that needs it (`user_code.py`). The text form of such a policy has
the file's whole path in it, so it means the same in the processes of a live run and in a trace read later.
See docs/write-your-own-policy.md.
"""

from __future__ import annotations

import re
from pathlib import Path

from paceline import user_code
from paceline.core import spec
from paceline.core.policy import CentralPolicy, Policy
from paceline.errors import ConfigError

WRITTEN = re.compile(r"(?P<file>.*?\.py):(?P<cls>[^:(@+,]*)(?P<rest>.*)", re.DOTALL)
AT_HEAD = re.compile(r"[^=(]*\.py\s*(:|$)")

AT_A_PATH = re.compile(r"(?:^|(?<=[+,]))\s*(?P<named>[./~][^=(]*?\.py\s*:\s*\w+)")
"""Matches a file and a class where a policy may begin. Such a path begins with a dot, a slash or a tilde; anything may
be in it, also what separates several policies."""
HIDDEN = re.compile(r"~(\d+)\0")


def mask_files(text: str) -> tuple[str, list[str]]:
    """Replaces each FILE.py:CLASS by `~0`, `~1`, ... (and a null, which no path has); returns the text and the
    files."""
    files: list[str] = []

    def hide(found: re.Match[str]) -> str:
        files.append(found["named"])
        return f"~{len(files) - 1}\0"

    return AT_A_PATH.sub(hide, text), files


def unmask_files(text: str, files: list[str]) -> str:
    return HIDDEN.sub(lambda found: files[int(found[1])], text)


def is_own(text: str) -> bool:
    return AT_HEAD.match(text) is not None


def parse(text: str) -> Policy:
    written = WRITTEN.fullmatch(text.strip())
    if written is None or not written["cls"].strip():
        raise ConfigError(f"{text!r} names no class: write FILE.py:CLASS, as ./mine.py:MyPolicy")
    user_code.refuse_if_remote(written["file"], "policy")
    cls = load(Path(written["file"]).expanduser(), written["cls"].strip())
    _, arguments = spec.split("own" + written["rest"])
    return spec.build(cls, arguments)


def load(path: Path, name: str) -> type[CentralPolicy]:
    """Runs the file and returns its class `name`, checked."""
    path = path.absolute()
    cls = check(vars(user_code.run(path, "policy")), name, path)
    cls.origin = f"{path}:{name}"
    return cls


def check(defined: dict[str, object], name: str, path: Path) -> type[CentralPolicy]:
    cls = defined.get(name)
    classes = [key for key, value in defined.items() if is_policy(value) and value is not CentralPolicy]
    if cls is None:
        raise ConfigError(f"{str(path)!r} has no {name!r} (policies in it: {', '.join(classes) or 'none'})")
    if not (isinstance(cls, type) and issubclass(cls, CentralPolicy)):
        raise ConfigError(f"{name} in {str(path)!r} is not a policy: derive it from paceline.policies.CentralPolicy")
    for wanted in ("on_arrival",):
        if not hasattr(cls, wanted):
            raise ConfigError(f"{name} in {str(path)!r} does not say {wanted}: set it to True or False")
    if "__dataclass_fields__" not in vars(cls):
        raise ConfigError(f"{name} in {str(path)!r} is not a dataclass: put @dataclass(frozen=True) on top of it")
    return cls


def is_policy(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, CentralPolicy)
