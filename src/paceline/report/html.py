"""The report: one HTML file with everything in it, for a browser, a mail or an archive. Nothing is loaded.

`render` is a pure function of what it is given, so equal runs give an equal page. The drawing is done here,
in SVG; the script only adds what moves (the value under the pointer, runs switched off and on).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.report import labels
from paceline.report.aborts import abort_table
from paceline.report.barrier_section import barrier_section
from paceline.report.charts import legend, line_chart
from paceline.report.histograms import staleness_section
from paceline.report.markup import plural, tag, text
from paceline.report.notes import notes
from paceline.report.peer_charts import peers_section
from paceline.report.report_model import USUAL, RunView, logged_metrics, target_of, verdict
from paceline.report.tables import MOST_METRICS, cause_table, config_table, reason_table, summary_table
from paceline.report.timeline import lanes


def render(runs: list[RunView], config: Mapping[str, Any]) -> str:
    """Makes the page as text."""
    target = target_of(config)
    title = _title(runs, config)
    header = tag("p", "paceline", class_="mark") + tag("h1", text(title))
    header += tag("p", text(verdict(runs, target)), class_="verdict") + _facts(runs, config)
    terms = "".join(tag("dt", text(term)) + tag("dd", text(meaning)) for term, meaning in labels.glossary(runs))
    drawn = dict.fromkeys((*USUAL, *logged_metrics(runs)[:MOST_METRICS]))
    charts = "".join(line_chart(name.capitalize() if name in USUAL else name, name, runs, target) for name in drawn)
    explained = "".join(tag("p", text(note), class_="note below") for note in notes(runs, target))
    curves = legend(runs) + tag("div", charts, class_="charts")
    sections = (
        ("Summary", summary_table(runs, target) + explained + tag("dl", terms, class_="terms")),
        ("Learning", curves if charts else _note("No evaluation was recorded.")),
        (labels.stale(runs), staleness_section(runs)),
        ("Who did what, when", lanes(runs)),
        *([("How far apart the peers were", apart)] if (apart := peers_section(runs)) else []),
        ("Who was waited for", _note(labels.causes(runs)) + cause_table(runs) + reason_table(runs)),
        ("Planned barriers", barrier_section(runs)),
        *((("What was begun again", abort_table(runs)),) if any(run.summary.get("aborts") for run in runs) else ()),
        ("Configuration", config_table(config)),
    )
    body = tag("header", header)
    body += "".join(tag("section", tag("h2", text(name)) + content) for name, content in sections if content)
    head = (
        '<meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
    )
    head += tag("title", text(f"{title} – paceline")) + tag("style", _asset("style.css"))
    page = tag("head", head) + tag("body", tag("main", body) + tag("script", _asset("script.js")))
    return f"<!doctype html>\n{tag('html', page, lang='en')}\n"


def write(path: str | os.PathLike[str], runs: list[RunView], config: Mapping[str, Any]) -> None:
    """Writes the page. A reader sees the old file or the new one, never a part."""
    final = Path(path)
    data = render(runs, config).encode("utf-8", errors="replace")
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _title(runs: list[RunView], config: Mapping[str, Any]) -> str:
    what = runs[0].policy if len(runs) == 1 else f"{len(runs)} runs compared"
    workload = config.get("workload")
    return f"{what} on {workload}" if isinstance(workload, str) else what


def _facts(runs: list[RunView], config: Mapping[str, Any]) -> str:
    """Makes the line under the verdict, which says where these numbers come from."""
    runtimes = dict.fromkeys(run.runtime for run in runs)
    said = {"virtual": "virtual time, real gradients", "live": "live processes, wall-clock time"}
    facts = [said.get(runtime, runtime) for runtime in runtimes]
    peers = labels.all_peers(runs)
    for key, noun in (("workers", labels.noun(runs)), ("servers", "server")):
        number = config.get(key)
        if isinstance(number, int) and not (peers and key == "servers"):
            facts.append(plural(number, noun))
    for change in runs[0].summary.get("server_changes", ()) if len(runs) == 1 else ():
        facts.append(f"{plural(change['after'], 'server')} from {change['at_s']:.1f} s on")
    uneven = {run.number("slices", "imbalance") for run in runs} - {None}
    if config.get("servers") != 1 and not peers and len(uneven) == 1:
        facts.append(f"largest slice {uneven.pop():.2f} times the mean")
    if "seed" in config:
        facts.append(f"seed {config['seed']}")
    return tag("p", "".join(tag("span", text(fact)) for fact in facts), class_="facts")


def _note(words: str) -> str:
    return tag("p", text(words), class_="note")


def _asset(name: str) -> str:
    return resources.files("paceline.report").joinpath(name).read_text(encoding="utf-8")


__all__ = ["RunView", "render", "write"]
