"""Events, actions and messages in words: one line for a person, the same in stories, test scripts and errors."""

from __future__ import annotations

from typing import assert_never

from paceline.core.actions import AbortCompute, Action, Answer, Apply, Compute, Drop, Park, Reduce, Send, SetTimer, Wait
from paceline.core.events import (
    AckArrived,
    ComputeAborted,
    Event,
    GradientReady,
    GradientRejected,
    HelloArrived,
    NotifyArrived,
    OfferArrived,
    ParametersArrived,
    PlanArrived,
    PullArrived,
    PullRepeated,
    PushArrived,
    PushRejected,
    ReleaseArrived,
    ReplyArrived,
    Restored,
    ResyncArrived,
    RiseArrived,
    ServersChanged,
    TimerFired,
    TokenArrived,
    UpdateArrived,
    ViewChanged,
)
from paceline.core.messages import (
    Ack,
    Handle,
    Hello,
    Message,
    Notify,
    Offer,
    Parameters,
    PeerMessage,
    Plan,
    Pull,
    Push,
    Release,
    Reply,
    Resync,
    Rise,
    Token,
    Update,
)

Process = tuple[int, int]
"""One life of a worker: its rank and its incarnation."""


def author(handle: Handle) -> Process:
    return handle.source, handle.incarnation


def asker(message: Pull | Parameters | Release | Notify | Resync) -> Process:
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
        case PullRepeated(pull=pull):
            return f"{in_words(pull)} again, to a new life of the server"
        case ParametersArrived(parameters=parameters):
            return f"answer of shard {parameters.shard} to {in_words(parameters)}"
        case GradientReady(iteration=iteration):
            return f"gradient of iteration {iteration} ready"
        case GradientRejected(iteration=iteration, reason=reason):
            return f"gradient of iteration {iteration} rejected, {reason}"
        case TimerFired(timer=timer):
            return f"timer {timer} fired"
        case RiseArrived(rise=rise):
            return in_words(rise)
        case ReleaseArrived(release=release):
            return in_words(release)
        case NotifyArrived(notify=notify):
            return in_words(notify)
        case ResyncArrived(resync=resync):
            return in_words(resync)
        case PlanArrived(plan=plan):
            return in_words(plan)
        case ComputeAborted(iteration=iteration, attempt=attempt):
            return f"attempt {attempt} at iteration {iteration} aborted"
        case UpdateArrived(update=message) | TokenArrived(token=message) | AckArrived(ack=message):
            return in_words(message)
        case HelloArrived(hello=message) | OfferArrived(offer=message) | ReplyArrived(reply=message):
            return in_words(message)
        case Update() | Token() | Ack() | Hello() | Offer() | Reply():
            return peer_words(thing)
        case Reduce(iteration, handles, weights, own):
            parts = [f"{weight:.3g} of peer {name(author(h))}'s" for h, weight in zip(handles, weights, strict=True)]
            return f"average for iteration {iteration}: {own:.3g} of its own, {', '.join(parts) or 'nothing else'}"
        case Wait(iteration, reason):
            return f"wait in iteration {iteration}: {reason}"
        case Push(handle):
            return f"push of iteration {handle.iteration} by worker {name(author(handle))}"
        case Pull(iteration=iteration, attempt=attempt):
            again = f" for attempt {attempt}" if attempt else ""
            return f"pull of iteration {iteration} by worker {name(asker(thing))}{again}"
        case Parameters(iteration=iteration, version=version, dropped=dropped):
            after = ", your push was dropped" if dropped else ""
            return f"worker {name(asker(thing))}: compute {iteration} on version {version}{after}"
        case Rise(shard, V):
            return f"rise of shard {shard} to V={V}"
        case Release(iteration=iteration):
            return f"release of worker {name(asker(thing))} to pull iteration {iteration}"
        case Notify(iteration=iteration):
            return f"notice of worker {name(asker(thing))} at iteration {iteration}"
        case Resync(iteration=iteration):
            return f"re-sync of worker {name(asker(thing))} in iteration {iteration}"
        case Plan(number, stops, due_s, wait_s):
            where = ", ".join(f"{name((worker, life))} at {stop}" for worker, life, stop in stops)
            return f"plan {number}: workers stop, {where}, by {due_s:.3g} s and waiting {wait_s:.3g} s at most"
        case AbortCompute(iteration, attempt):
            return f"abort attempt {attempt} at iteration {iteration}"
        case Compute(iteration, attempt):
            return f"compute iteration {iteration}{f', attempt {attempt}' if attempt else ''}"
        case Send(to, message):
            return f"send {to} the {in_words(message)}"
        case Apply(handles, weight, version):
            which = " and ".join(f"{handle.iteration} of worker {name(author(handle))}" for handle in handles)
            return f"apply iteration {which} at weight {weight:.3g}, making version {version}"
        case Drop(handle, reason):
            what = in_words(Push(handle) if handle.nbytes else Update(handle))
            return f"drop the {what}: {reason}"
        case Answer(parameters, reason, released_by):
            by = f", by worker {released_by}" if released_by >= 0 else ""
            return f"answer {in_words(parameters)}{f' (was parked: {reason}{by})' if reason else ''}"
        case Park(pull, reason):
            return f"park the {in_words(pull)}: {reason}"
        case SetTimer(timer, after_s):
            return f"set timer {timer} to fire in {after_s:.3g} s"
        case _:
            assert_never(thing)


def peer_words(message: PeerMessage) -> str:
    match message:
        case Update(handle):
            return f"update of iteration {handle.iteration} by peer {name(author(handle))}"
        case Token(peer, incarnation, iteration):
            return f"token of peer {name((peer, incarnation))}, in iteration {iteration}"
        case Ack(peer, incarnation, iteration):
            return f"ack of iteration {iteration} by peer {name((peer, incarnation))}"
        case Hello(peer, incarnation, iteration, first, view):
            where = f"in iteration {iteration}, updates from {first} on" if iteration >= 0 else "new here"
            return f"hello of peer {name((peer, incarnation))} in view {view}, {where}"
        case Offer(handle):
            return f"offer of iteration {handle.iteration} by peer {name(author(handle))}"
        case Reply(peer, incarnation, iteration, answer):
            what = "parameters" if answer is not None else "no parameters, it is busy"
            return f"reply of peer {name((peer, incarnation))} to the offer of iteration {iteration}: {what}"
        case _:
            assert_never(message)
