"""A user's own code by name: `./mine.py:MyWorkload` is the thing called MyWorkload in the file ./mine.py.

Whatever goes wrong there, in the path, in the name or while the file runs, becomes one line that says where.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import ConfigError

NAMES_A_FILE = re.compile(r"^(?P<path>.+\.py)(?::(?P<name>\w*))?$")


def names_a_file(text: str) -> bool:
    """Whether a text means something in a Python file rather than something of paceline's."""
    return NAMES_A_FILE.match(text) is not None


def load(text: str, kind: str) -> Any:
    """The object that FILE.py:NAME names. `kind` is what it is wanted for, in words: "workload"."""
    match = NAMES_A_FILE.match(text)
    if match is None or not match["name"]:
        raise ConfigError(f"the {kind} {text!r} lacks a name: write FILE.py:NAME")
    module = run(Path(match["path"]), kind)
    if not hasattr(module, match["name"]):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        there = f" (it has: {', '.join(own)})" if own else ""
        raise ConfigError(f"there is no {match['name']} in {match['path']}{there}")
    return getattr(module, match["name"])


def run(path: Path, kind: str) -> ModuleType:
    """The file as a module, run once unless it changes: a second use in the same process gets the same classes."""
    try:
        status = path.stat()
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    if not is_file:
        raise ConfigError(f"there is no file {str(path)!r} to take the {kind} from")
    key = f"{path.resolve()} {status.st_mtime_ns} {status.st_size}"
    name = f"paceline_user_{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(describe(error, path)) from None
    return module


def describe(error: BaseException, path: Path) -> str:
    """An exception from a user's file in one line: where in the file, which, and what it says."""
    if isinstance(error, ConfigError):
        return str(error)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
    where = f"{path}:{line}" if line is not None else str(path)
    said = " ".join(str(error).split()) or "it says nothing more"
    return f"{where} failed: {type(error).__name__}: {said}"
