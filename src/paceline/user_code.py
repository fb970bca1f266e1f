"""A user's own code by name: `./mine.py:MyWorkload` is the thing called MyWorkload in the file ./mine.py.

Whatever goes wrong there, in the path, in the name or while the file runs, becomes one line that says where. Modules
in the file's folder can be imported as they can from a script that Python runs.

A text that another host has sent never names a file here: while `text_of_another_host` lasts, whoever would turn a text
into a path raises instead (`refuse_if_remote`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import ConfigError

NAMES_A_FILE = re.compile(r"^(?P<path>.+\.py)(?::(?P<name>\w*))?$")
_REMOTE = ContextVar("text of another host", default=False)
_FOLDERS: set[Path] = set()
"""The folders of the files that were run in this process."""


@contextmanager
def text_of_another_host() -> Iterator[None]:
    """Marks what is read in this context as written on another host: no text of it becomes a path here."""
    token = _REMOTE.set(True)
    try:
        yield
    finally:
        _REMOTE.reset(token)


def is_remote() -> bool:
    """Whether the text that is being read was written on another host."""
    return _REMOTE.get()


def refuse_if_remote(path: object, kind: str) -> None:
    """Raises `ConfigError` if a file is about to be used because another host has named it."""
    if is_remote():
        raise ConfigError(
            f"another host names the file {str(path)!r} as the {kind}: files are only taken from this host's own "
            "command line or script"
        )


def names_a_file(text: str) -> bool:
    """Whether a text names something in a Python file rather than something of paceline's."""
    return NAMES_A_FILE.match(text) is not None


def load(text: str, kind: str) -> Any:
    """Returns the object that FILE.py:NAME names. `kind` says what it is wanted for: "workload"."""
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
    """Runs the file as a module, once unless it changes: a second use in the same process gets the same classes."""
    refuse_if_remote(path, kind)
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
        with importable(path.resolve().parent):
            found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(describe(error, path)) from None
    return module


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Has modules of this folder come first in imports now, and last later, when a function of the file may import
    some.

    A module of the same name that the file of another folder has imported is forgotten.
    """
    for name in [name for name in sys.modules if _is_of_others(name.partition(".")[0], folder)]:
        del sys.modules[name]
    _FOLDERS.add(folder)
    place = str(folder)
    was_there = place in sys.path
    sys.path.insert(0, place)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if place in sys.path:
            sys.path.remove(place)
        if not was_there:
            sys.path.append(place)


def _is_of_others(name: str, folder: Path) -> bool:
    """Whether the module loaded under this name is another user folder's, although `folder` has one of that name."""
    if not ((folder / f"{name}.py").is_file() or (folder / name).is_dir()):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return False
    origin = Path(file).parent.parent if Path(file).name == "__init__.py" else Path(file).parent
    return origin in _FOLDERS - {folder}


def describe(error: BaseException, path: Path) -> str:
    """Describes an exception from a user's file in one line: where in the file, which, and its message."""
    if isinstance(error, ConfigError):
        return str(error)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
    where = f"{path}:{line}" if line is not None else str(path)
    said = " ".join(str(error).split()) or "it says nothing more"
    return f"{where} failed: {type(error).__name__}: {said}"
