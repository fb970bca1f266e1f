"""The wheel and the sdist, installed into a fresh venv: with all files, and without a C compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "site", "runs", "demo", "__pycache__", "*.so")
NEEDED = ("report/style.css", "page/page.html", "page/page.css", "page/page.js", "py.typed", "workloads/tiny.txt")
TRAINS = "import paceline; print(paceline.simulate('quadratic', 'bsp', workers=2, iterations=3).metrics.gradients)"


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Runs a program that must succeed; this checkout is not on its path."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(each) for each in command], cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_wheel_and_sdist_install_without_a_compiler(tmp_path: Path) -> None:
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=LEFT_OUT, symlinks=True)
    build = "import setuptools.build_meta as b, sys; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
    for kind in ("wheel", "sdist"):
        run(sys.executable, "-c", build, kind, tmp_path, cwd=source, CC="/bin/false")
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = source / "src" / "paceline"
    missing = {path for path in package.rglob("*.py") if f"paceline/{path.relative_to(package)}" not in names}
    assert not missing
    assert {each for each in NEEDED if (package / each).exists() and f"paceline/{each}" not in names} == set()
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/_passes.c") for name in archive.getnames())

    for place, kind in enumerate((wheel, sdist)):
        venv = tmp_path / f"venv-{place}"
        run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
        python = venv / "bin" / "python"
        # The dependencies are those of this interpreter: torch need not be loaded from afar once more.
        (site,) = (venv / "lib").glob("python*/site-packages")
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        shutil.rmtree(site / "setuptools", ignore_errors=True)  # it may be older than what builds from source needs
        options = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--ignore-installed")
        run(python, "-m", "pip", "install", *options, kind, cwd=tmp_path, CC="/bin/false")
        where = run(python, "-c", "import paceline; print(paceline.__file__)", cwd=tmp_path)
        assert Path(where.strip()).is_relative_to(venv)
        assert run(python, "-c", TRAINS, cwd=tmp_path).strip() == "6"
        assert "page" in run(venv / "bin" / "paceline", "--help", cwd=tmp_path)
