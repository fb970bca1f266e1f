"""What the comparison needs said beside its table, in the terminal and on the page: what a missing figure means, in
what staleness is counted, and what times cannot tell."""

from __future__ import annotations

from paceline.report.report_model import RunView, Target, baseline_of, logged_metrics, run_labels, speed_up

SLOW = 1.5
"""A worker whose computations take so many times as long as the others' is a slow one."""


def notes(runs: list[RunView], target: Target | None) -> list[str]:
    """The sentences below the table."""
    return [*_missing(runs, target), *_short_again(runs, target), *_too_little(runs, target), *_staleness(runs)]


def stale_in(runs: list[RunView]) -> str:
    """What staleness is called in a heading: gradients are some updates old, parameters of peers some iterations."""
    with_peers = {run.peers is not None for run in runs}
    return "staleness" if len(with_peers) > 1 else "iterations stale" if with_peers == {True} else "updates stale"


def _missing(runs: list[RunView], target: Target | None) -> list[str]:
    """Why there is no speed-up, or no final value of a metric, where others have one."""
    names, said = run_labels(runs), []
    for index, run in enumerate(runs):
        base = baseline_of(index, runs)
        if len(runs) > 1 and speed_up(index, runs, target) is None:
            said.append(_no_speed_up(run, runs[base], names[index], names[base], target))
    for metric in logged_metrics(runs):
        without = [name for name, run in zip(names, runs, strict=True) if run.number("final", metric) is None]
        if without:
            said.append(f"no {metric} for {', '.join(without)}: none was logged, or the last one is no finite number")
    return list(dict.fromkeys(said))


def _no_speed_up(run: RunView, base: RunView, name: str, base_name: str, target: Target | None) -> str:
    for each, called in ((base, base_name), (run, name)):
        if target is not None and each.number("time_to_target_s") is None:
            return f"no speed-up {'over' if each is base else 'for'} {called}: it did not reach {target.text}"
        if target is None and each.summary.get("diverged"):
            return f"no speed-up {'over' if each is base else 'for'} {called}: it diverged"
    if target is not None:
        return f"no speed-up for {name}: it reached {target.text} at once"
    mine, theirs = run.number("gradients"), base.number("gradients")
    return f"no speed-up for {name}: it computed {mine or 0:.0f} gradients, {base_name} {theirs or 0:.0f}"


def _short_again(runs: list[RunView], target: Target | None) -> list[str]:
    """A live run goes on while its target is being noticed, and what it ends with may be worse."""
    short = []
    for name, run in zip(run_labels(runs), runs, strict=True):
        final = run.number("final", target.metric) if target is not None else None
        if target is not None and final is not None and run.number("time_to_target_s") is not None:
            upwards = ">" in target.text or (target.metric == "accuracy" and "<" not in target.text)
            short += [name] * (final < target.value if upwards else final > target.value)
    if target is None or not short:
        return []
    return [f"final {target.metric} of {', '.join(short)}: at the end, a little after {target.text} was reached"]


def _too_little(runs: list[RunView], target: Target | None) -> list[str]:
    """With a fixed number of iterations every run lasts as long as its slowest worker takes for them."""
    slowest = max((run.number("slowest_worker") or 1.0 for run in runs), default=1.0)
    if target is not None or len(runs) < 2 or slowest < SLOW:
        return []
    return [
        f"the slowest worker computes {slowest:.1f} times as long as the others: without a target a run lasts until it "
        "has done its iterations, whoever waits for whom, and only a target compares policies (--target)"
    ]


def _staleness(runs: list[RunView]) -> list[str]:
    """A policy's bound counts iterations of workers, the table what the shards or peers see."""
    bounded = next((run.policy for run in runs if "staleness=" in run.policy and run.peers is None), None)
    said = []
    if stale_in(runs) == "staleness":
        said.append("staleness is counted in updates where there are servers, and in iterations where there are peers")
    elif bounded is not None:
        said.append("updates stale: those the servers made between reading parameters and using the gradient")
    if bounded is not None:
        said.append(f"the staleness in {bounded} counts iterations of workers")
    return ["; ".join(said)] if said else []
