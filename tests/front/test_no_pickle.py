"""No pickle anywhere: not on the wire, not in checkpoints, logs or the run's folder, not by a function that uses it."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "copyreg"}
CALLS = {
    ("torch", "load"),
    ("torch", "save"),
    ("np", "load"),
    ("numpy", "load"),
    ("np", "save"),
    ("multiprocessing", "Queue"),
    ("multiprocessing", "Pipe"),
    ("dist", "broadcast_object_list"),
    ("dist", "all_gather_object"),
}
METHODS = {"send_pyobj", "recv_pyobj", "allow_pickle", "broadcast_object_list", "all_gather_object", "gather_object"}


def found(source: str) -> list[str]:
    """What in a module pickles, or might."""
    bad = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                bad += [f"{node.lineno}: import {name.name}" for name in names if name.name.split(".")[0] in PICKLES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLES:
                bad.append(f"{node.lineno}: from {module}")
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if (owner, name) in CALLS:
                bad.append(f"{node.lineno}: {owner}.{name}")
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) if name in METHODS:
                bad.append(f"{getattr(node, 'lineno', '?')}: {name}")
    return bad


def test_nothing_in_the_package_pickles() -> None:
    package = Path(paceline.__file__).parent
    bad = {
        str(path.relative_to(package)): lines
        for path in sorted(package.rglob("*.py"))
        if (lines := found(path.read_text(encoding="utf-8")))
    }
    assert bad == {}


def test_it_would_be_found() -> None:
    assert found("import pickle") == ["1: import pickle"]
    assert found("from cloudpickle import dumps")
    assert found("torch.load(path)")
    assert found("socket.send_pyobj(x)")
    assert found("np.fromfile(p, allow_pickle=True)")
    assert found("load_file(path)") == []
