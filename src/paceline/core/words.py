"""Events, actions and messages in words: one line for a person, the same in stories, test scripts and errors."""

from __future__ import annotations

from typing import assert_never

from paceline.core.actions import Action, Answer, Apply, Compute, Drop, Park, Send, SetTimer
from paceline.core.events import (
    Event,
    GradientReady,
    ParametersArrived,
    PullArrived,
    PushArrived,
    PushRejected,
    ReleaseArrived,
    Restored,
    RiseArrived,
    ServersChanged,
    TimerFired,
    ViewChanged,
)
from paceline.core.messages import Handle, Message, Parameters, Pull, Push, Release, Rise

Process = tuple[int, int]
"""One life of a worker: its rank and its incarnation."""


def author(handle: Handle) -> Process:
    return handle.source, handle.incarnation


def asker(message: Pull | Parameters | Release) -> Process:
    return message.worker, message.incarnation


def name(process: Process) -> str:
    """'1' for the first life of worker 1, '1.2' for its third."""
    rank, incarnation = process
    return f"{rank}.{incarnation}" if incarnation else f"{rank}"


def in_words(thing: Event | Action | Message) -> str:
    """One line for a person, the same in stories and in the test scripts."""
    match thing:
        case ViewChanged(view=view):
            return f"view {view.number} of workers {', '.join(map(name, view.members)) or 'none'}"
        case Restored(iteration=iteration, version=version):
            return f"restored to iteration {iteration}, version {version}"
        case ServersChanged(nbytes=nbytes):
            return f"{len(nbytes)} servers from now on"
        case PushArrived(push=push):
            return in_words(push)
        case PushRejected(push=push, reason=reason):
            return f"{in_words(push)} rejected, {reason}"
        case PullArrived(pull=pull):
            return in_words(pull)
        case ParametersArrived(parameters=parameters):
            return f"answer of shard {parameters.shard} to {in_words(parameters)}"
        case GradientReady(iteration=iteration):
            return f"gradient of iteration {iteration} ready"
        case TimerFired(timer=timer):
            return f"timer {timer} fired"
        case RiseArrived(rise=rise):
            return in_words(rise)
        case ReleaseArrived(release=release):
            return in_words(release)
        case Push(handle):
            return f"push of iteration {handle.iteration} by worker {name(author(handle))}"
        case Pull(iteration=iteration):
            return f"pull of iteration {iteration} by worker {name(asker(thing))}"
        case Parameters(iteration=iteration, version=version, dropped=dropped):
            after = ", your push was dropped" if dropped else ""
            return f"worker {name(asker(thing))}: compute {iteration} on version {version}{after}"
        case Rise(shard, V):
            return f"rise of shard {shard} to V={V}"
        case Release(iteration=iteration):
            return f"release of worker {name(asker(thing))} to pull iteration {iteration}"
        case Compute(iteration):
            return f"compute iteration {iteration}"
        case Send(to, message):
            return f"send {to} the {in_words(message)}"
        case Apply(handles, weight, version):
            which = " and ".join(f"{handle.iteration} of worker {name(author(handle))}" for handle in handles)
            return f"apply iteration {which} at weight {weight:.3g}, making version {version}"
        case Drop(handle, reason):
            return f"drop the {in_words(Push(handle))}: {reason}"
        case Answer(parameters, reason, released_by):
            by = f", by worker {released_by}" if released_by >= 0 else ""
            return f"answer {in_words(parameters)}{f' (was parked: {reason}{by})' if reason else ''}"
        case Park(pull, reason):
            return f"park the {in_words(pull)}: {reason}"
        case SetTimer(timer, after_s):
            return f"set timer {timer} to fire in {after_s:.3g} s"
        case _:
            assert_never(thing)
