"""A calibrated scenario as a file that a person reads and edits."""

from __future__ import annotations

from paceline.advice.calibration import Calibration
from paceline.cluster import Cluster, to_table

COMMENTS = {
    "latency_s": "seconds until what is sent is heard, beyond the processor times below",
    "bandwidth": "bytes a second of each server, in each direction",
    "per_sample": "the part of an iteration that grows with its batch",
    "cores": "all workers and servers share them",
    "worker_s": "processor time of a worker in an exchange",
    "message_s": "of a server, for each push, and for each byte of it",
    "step_s": "for each step, and for each byte it reads or writes",
    "first_s": "processor time that the first iteration of a worker needs besides",
    "answer_s": "for each answer, and for each byte of it",
    "cpu_share": "the part of a computation that needs a core",
    "cpu_s": "what of a computation needs a core; the scenario of the run set its length",
    "startup_s": "until the run trained",
    "compute_s": "the mean of its computations",
    "spread": "equally likely parts of them, as parts of the mean",
    "memory": "how much a computation is like the one before",
    "common": "how much is common to all workers",
}


def write(calibration: Calibration, name: str) -> str:
    """Returns the text of the file; `name` is that of the run."""
    measured = calibration.measured
    links = ", ".join(sorted(measured.links)) or "memory"
    head = [
        f"Measured in {name}: {measured.policy}, {measured.workers} workers, {measured.servers} servers ({links}), "
        f"{measured.iterations} iterations of each worker.",
        f"An iteration took {1e3 * measured.iteration_s:.2f} ms; done again in virtual time it takes "
        f"{1e3 * calibration.fitted_s:.2f} ms.",
        "Use it anywhere a scenario goes, as paceline compare --cluster FILE; docs/advice.md says what the keys mean.",
    ]
    return "".join(f"# {line}\n" for line in head) + to_toml(calibration.cluster)


def to_toml(cluster: Cluster) -> str:
    """Writes a scenario as TOML, so that `cluster.read` reads it."""
    table = to_table(cluster)
    lists = {key: value for key, value in table.items() if isinstance(value, list) and key != "machines"}
    plain = {key: value for key, value in table.items() if key not in lists and not isinstance(value, dict)}
    lines = [_line(key, value) for key, value in plain.items() if not _is_usual(cluster, key, value)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]", *(_line(name, each) for name, each in value.items())]
    for key, tables in lists.items():
        for number, each in enumerate(tables):
            lines += ["", f"[[{key}]]", *(_line(name, said, number == 0) for name, said in each.items())]
    return "\n".join(lines) + "\n"


def _is_usual(cluster: Cluster, key: str, value: object) -> bool:
    """Whether a key may be left out: it has the value that it has anyway."""
    return key != "model" and getattr(type(cluster)(), key, None) == value


def _line(key: str, value: object, said: bool = True) -> str:
    written = _write(value)
    comment = COMMENTS.get(key, "") if said and len(written) < 40 else ""
    return f"{key} = {written}" + (f"  # {comment}" if comment else "")


def _write(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_write, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:.4g}"
        return short if any(letter in short for letter in ".en") else short + ".0"
    if isinstance(value, int):
        return str(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
