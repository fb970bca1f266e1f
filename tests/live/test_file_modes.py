"""What a run leaves, on disk and in shared memory, is its owner's only, whatever the umask is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.run import write_whole
from paceline.runtime.live.storage.file_transfer import MessageRefused, unpack
from tests import forked

SCRIPT = """
import contextlib, json, sys, time, torch, paceline
from pathlib import Path
model = torch.nn.Linear(4, 1)
opt = paceline.Optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
for step in range(40):
    opt.zero_grad(); model(torch.ones(2, 4)).sum().backward(); opt.step()
here = Path(sys.argv[1])
while not list(here.glob("checkpoints/*/manifest.json")):
    time.sleep(0.01)
if paceline.init().rank == 0:
    shared = Path(json.loads((here / "live.json").read_text())["folder"])
    modes = {}
    for path in (here, shared, *here.rglob("*"), *shared.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # a checkpoint may become whole meanwhile
            modes[str(path)] = path.lstat().st_mode
    Path(sys.argv[2]).write_text(json.dumps(modes))
"""


def open_to_others(modes: dict[str, int]) -> list[str]:
    """A link has no mode of its own that counts."""
    return [f"{path} {mode:o}" for path, mode in modes.items() if mode & 0o077 and mode & 0o170000 != 0o120000]


@pytest.mark.parametrize("durable", [pytest.param(False, marks=pytest.mark.ci), True], ids=["plain", "durable"])
def test_nobody_else_can_read_a_run(durable: bool, tmp_path: Path) -> None:
    script, folder, seen = tmp_path / "train.py", tmp_path / "run", tmp_path / "modes"
    script.write_text(SCRIPT)
    options = ["--workers", "2", "--servers", "2", "--policy", "asp", "--checkpoint-updates", "10"]
    options += ["--durable"] if durable else []
    done = forked.run(["-m", "paceline", "run", "--dir", folder, *options, script, folder, seen], tmp_path, umask=0)
    assert done.returncode == 0, done.stdout + done.stderr
    while_it_ran = json.loads(seen.read_text())
    names = {Path(path).name for path in while_it_ran}
    assert {"config", "live.json", "manifest.json", "trace", "driver", "lock"} <= names
    assert open_to_others(while_it_ran) == []
    assert open_to_others({str(path): path.lstat().st_mode for path in (folder, *folder.rglob("*"))}) == []


def test_what_the_user_asks_for_elsewhere_has_the_mode_that_the_user_wants(tmp_path: Path) -> None:
    write_whole(tmp_path / "report.html", b"x")
    (tmp_path / "as always").write_bytes(b"x")
    assert (tmp_path / "report.html").stat().st_mode == (tmp_path / "as always").stat().st_mode


@pytest.mark.parametrize("name", ["trace/x", "trace"], ids=["a file for a folder", "a folder for a file"])
def test_a_file_that_has_no_place_is_refused_and_no_error(name: str, tmp_path: Path) -> None:
    """Whoever sends it decides its name: that a file is where its folder is to be must not end the driver."""
    if name == "trace":
        (tmp_path / "trace").mkdir()
    else:
        (tmp_path / "trace").write_text("a file")
    with pytest.raises(MessageRefused, match="cannot be written"):
        unpack(tmp_path, name, 0, 1, b"x")
    assert not list(tmp_path.glob("**/.*"))
