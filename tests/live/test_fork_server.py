"""Workers that are forks of a process that has imported torch: as fresh interpreters, but sooner."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.runtime.live.driver.children import Child
from paceline.runtime.live.driver.script_workers import ScriptWorkers
from paceline.runtime.live.system import fork_server

SCRIPT = str(Path(__file__).with_name("worker_state.py"))
THREADS = 2
RUN_ALONE = """
import os, sys, time
from pathlib import Path
from paceline.runtime.live.driver.script_workers import script_starter
os.environ["DEED"] = "sleep"
starter = script_starter(sys.argv[1:], 1)
child = starter.start(0, 0, Path("."))
while b"asleep" not in os.read(child.outputs[0], 1 << 16):
    pass
print(child.pid, *Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def forked() -> Iterator[ScriptWorkers]:
    """Workers that are forks; for all tests one fork server, which takes seconds to start."""
    workers = ScriptWorkers([SCRIPT, "--lr", "0.1"], THREADS, True, ("sklearn.datasets",), fresh=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        workers.prepare()
        yield workers
    workers.close()


@pytest.fixture
def fresh() -> ScriptWorkers:
    return ScriptWorkers([SCRIPT, "--lr", "0.1"], THREADS, True, (), fresh=True)


def ended(child: Child) -> tuple[str, int]:
    """Returns what a worker has printed when it has ended, and its exit code."""
    said = b""
    while data := os.read(child.outputs[0], 1 << 16):
        said += data
    os.close(child.outputs[0])
    return said.decode(), child.reap()


def await_sleep(child: Child) -> None:
    said = b""
    while b"asleep" not in said:
        said += os.read(child.outputs[0], 1 << 16)


@pytest.fixture
def deed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Has a worker do something, and returns what it has printed and its exit code."""

    def do(workers: ScriptWorkers, what: str) -> tuple[str, int]:
        monkeypatch.setenv("DEED", what)
        return ended(workers.start(0, 0, tmp_path))

    return do


def test_a_script_finds_what_it_would_find_in_a_fresh_interpreter(forked, fresh, deed) -> None:
    states = [json.loads(deed(workers, "state")[0].splitlines()[0]) for workers in (forked, fresh)]
    assert states[0].keys() == states[1].keys()
    for name, found in states[0].items():
        assert found == states[1][name], name
    assert states[0]["torch"][0] == THREADS


@pytest.mark.parametrize(
    ("what", "said", "code"),
    [
        ("exit", ["a thread has ended", "at exit"], 3),
        ("say", ["in words", "a thread has ended", "at exit"], 1),
        ("fail", ["worker 0 failed:", "Traceback", "worker_state.py", "as asked", "a thread has ended", "at exit"], 1),
        ("killed", [], -signal.SIGKILL),
        ("crash", ["Fatal Python error: Segmentation fault", "worker_state.py"], -signal.SIGSEGV),
    ],
)
def test_a_script_ends_as_in_a_fresh_interpreter(what, said, code, forked, fresh, deed) -> None:
    ends = [deed(workers, what) for workers in (forked, fresh)]
    for text, found in ends:
        assert found == code
        places = [text.find(part) for part in said]
        assert -1 not in places, text
        assert places == sorted(places), text
    if what == "fail":  # with the script's own lines
        assert ends[0] == ends[1]
        assert 'raise ValueError("as asked")' in ends[0][0]


def test_no_two_forks_draw_the_same_numbers(forked, deed) -> None:
    first, second = (json.loads(deed(forked, "numbers")[0].splitlines()[0]) for _ in range(2))
    assert all(mine != theirs for mine, theirs in zip(first, second, strict=True))


def test_a_fork_is_a_child_and_outlives_the_fork_server(deed, monkeypatch, tmp_path, fresh) -> None:
    """After the end of the fork server workers are fresh interpreters, and the first one says why."""
    workers = ScriptWorkers([SCRIPT], 2, True, (), fresh=False)
    monkeypatch.setenv("DEED", "sleep")
    child = workers.start(0, 0, tmp_path)
    await_sleep(child)
    assert workers.server is not None
    workers.server.process.kill()
    workers.server.process.wait()
    assert select.select([child.sentinel], [], [], 0.2)[0] == []
    said, code = deed(workers, "forked")
    why, was_forked = said.splitlines()[:2]
    assert why == "workers are started as fresh interpreters, not as forks: the fork server has ended"
    assert (was_forked, code) == ("False", 0)
    assert deed(workers, "forked")[0].splitlines()[0] == "False"
    child.kill()
    assert ended(child)[1] == -signal.SIGKILL


def test_all_end_with_the_process_that_has_started_them() -> None:
    with subprocess.Popen([sys.executable, "-c", RUN_ALONE, SCRIPT], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        worker, *children = map(int, driver.stdout.readline().split())
        assert worker in children
        assert len(children) == 2  # and the fork server
        watched = [os.pidfd_open(pid) for pid in children]
        driver.kill()
        for sentinel in watched:
            assert select.select([sentinel], [], [], 60)[0]
            os.close(sentinel)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("raise OSError('no disk')", "importing unwilling failed: OSError: no disk"),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
         "importing unwilling starts threads"),
        ("import os; fd = os.open('nvidia0', os.O_CREAT)", "importing unwilling uses a GPU"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_before_the_fork(module, why, tmp_path) -> None:
    (tmp_path / "unwilling.py").write_text(module)
    program = "import paceline.fork_server_process as f; f.GPUS = f.os.getcwd() + '/nvidia'; f.preload('unwilling')"
    environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.stderr.splitlines()[-1].endswith(f"CannotPreloadError: {why}")


def test_without_a_fork_server_a_run_says_so_once_and_has_what_imports_print(tmp_path) -> None:
    (tmp_path / "noisy.py").write_text("print('imported')")
    (tmp_path / "train.py").write_text(
        "import os, sys, paceline\npaceline.init()\nprint('forked' if 'noisy' in sys.modules else 'fresh')\n"
    )
    run = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--dir", "run", "--preload", "noisy"]
    done = subprocess.run([*run, "missing", "train.py"], capture_output=True, text=True, cwd=tmp_path)
    said = done.stdout + done.stderr
    assert said.count("not as forks: importing missing failed: ModuleNotFoundError: No module named 'missing'") == 1
    assert said.count(": imported") == 1
    assert said.count(": fresh") == 2


def test_one_that_was_started_early_is_taken_once_if_it_is_for_this(deed) -> None:
    with fork_server.started_early([SCRIPT], 1 << 20):
        workers = ScriptWorkers([SCRIPT], 1, True, (), fresh=False)
        assert workers.server is not None
        assert fork_server.take_early([SCRIPT], 1) is None
    assert deed(workers, "forked")[0].splitlines()[0] == "True"
    workers.close()
    with fork_server.started_early([SCRIPT], 1 << 20):
        assert fork_server.take_early(["another.py"], 1) is None
