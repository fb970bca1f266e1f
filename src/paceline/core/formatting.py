"""Events, actions and messages in words: one line for a person, the same in stories, test scripts and errors."""

from __future__ import annotations

from typing import assert_never

from paceline.core import actions, events, messages
from paceline.core.messages import Handle, OfWorker, Parameters, Process


def source_process(handle: Handle) -> Process:
    return handle.source, handle.incarnation


def source_name(handle: Handle) -> str:
    return name(source_process(handle))


def requester(message: OfWorker | Parameters) -> Process:
    return message.worker, message.incarnation


def name(process: Process) -> str:
    """Names a process: '1' for the first incarnation of worker 1, '1.2' for the third."""
    rank, incarnation = process
    return f"{rank}.{incarnation}" if incarnation else f"{rank}"


def to_text(thing: events.Event | actions.Action | messages.Message) -> str:
    """One line for a person, the same in stories and in the test scripts."""
    match thing:
        case events.ViewChanged(view=view):
            finished = f", {', '.join(map(str, view.finished))} finished" if view.finished else ""
            return f"view {view.number} of workers {', '.join(map(name, view.members)) or 'none'}{finished}"
        case events.Restored(iteration=iteration, version=version):
            return f"restored to iteration {iteration}, version {version}"
        case events.ServersChanged(nbytes=nbytes):
            return f"{len(nbytes)} servers from now on"
        case events.PushArrived(push=message) | events.PullArrived(pull=message) | events.PlanArrived(plan=message):
            return to_text(message)
        case (
            events.RiseArrived(rise=message) | events.SliceNormArrived(norm=message) | events.NormArrived(norm=message)
        ):
            return to_text(message)
        case events.ReleaseArrived(release=message) | events.NotifyArrived(notify=message):
            return to_text(message)
        case events.ResyncArrived(resync=message) | events.UpdateArrived(update=message):
            return to_text(message)
        case events.TokenArrived(token=message) | events.AckArrived(ack=message) | events.HelloArrived(hello=message):
            return to_text(message)
        case events.OfferArrived(offer=message) | events.ReplyArrived(reply=message):
            return to_text(message)
        case events.PushRejected(push=push, reason=reason):
            return f"{to_text(push)} rejected, {reason}"
        case events.PullRepeated(pull=pull):
            return f"{to_text(pull)} again, to a restarted server"
        case events.ParametersArrived(parameters=parameters):
            return f"answer of shard {parameters.shard} to {to_text(parameters)}"
        case events.GradientReady(iteration=iteration):
            return f"gradient of iteration {iteration} ready"
        case events.GradientRejected(iteration=iteration, reason=reason):
            return f"gradient of iteration {iteration} rejected, {reason}"
        case events.TimerFired(timer=timer):
            return f"timer {timer} fired"
        case events.ComputeAborted(iteration=iteration, attempt=attempt):
            return f"attempt {attempt} at iteration {iteration} aborted"
        case messages.Update(handle):
            return f"update of iteration {handle.iteration} by peer {source_name(handle)}"
        case messages.Token(peer, incarnation, iteration):
            return f"token of peer {name((peer, incarnation))}, in iteration {iteration}"
        case messages.Ack(peer, incarnation, iteration):
            return f"ack of iteration {iteration} by peer {name((peer, incarnation))}"
        case messages.Hello(peer, incarnation, iteration, first, view):
            where = f"in iteration {iteration}, updates from {first} on" if iteration >= 0 else "new here"
            return f"hello of peer {name((peer, incarnation))} in view {view}, {where}"
        case messages.Offer(handle):
            return f"offer of iteration {handle.iteration} by peer {source_name(handle)}"
        case messages.Reply(peer, incarnation, iteration, answer):
            what = "parameters" if answer is not None else "no parameters, it is busy"
            return f"reply of peer {name((peer, incarnation))} to the offer of iteration {iteration}: {what}"
        case actions.Reduce(iteration, handles, weights, own):
            parts = [f"{weight:.3g} of peer {source_name(h)}'s" for h, weight in zip(handles, weights, strict=True)]
            return f"average for iteration {iteration}: {own:.3g} of its own, {', '.join(parts) or 'nothing else'}"
        case actions.Wait(iteration, reason):
            return f"wait in iteration {iteration}: {reason}"
        case messages.Push(handle):
            of_weight = f" of weight {handle.weight:g}" if handle.weight != 1 else ""
            return f"push of iteration {handle.iteration} by worker {source_name(handle)}{of_weight}"
        case messages.Pull(iteration=iteration, attempt=attempt):
            again = f" for attempt {attempt}" if attempt else ""
            return f"pull of iteration {iteration} by worker {name(requester(thing))}{again}"
        case messages.Parameters(iteration=iteration, version=version, dropped=dropped):
            after = ", your push was dropped" if dropped else ""
            return f"worker {name(requester(thing))}: compute {iteration} on version {version}{after}"
        case messages.Rise(shard, V):
            return f"rise of shard {shard} to V={V}"
        case messages.Release(iteration=iteration):
            return f"release of worker {name(requester(thing))} to pull iteration {iteration}"
        case messages.Notify(iteration=iteration):
            return f"notice of worker {name(requester(thing))} at iteration {iteration}"
        case messages.Resync(iteration=iteration):
            return f"re-sync of worker {name(requester(thing))} in iteration {iteration}"
        case messages.Plan(number, stops, due_s, wait_s):
            where = ", ".join(f"{name((worker, incarnation))} at {stop}" for worker, incarnation, stop in stops)
            return f"plan {number}: workers stop, {where}, by {due_s:.3g} s and waiting {wait_s:.3g} s at most"
        case messages.SliceNorm(shard, iteration, squared):
            what = "no step" if squared is None else f"a mean of squared norm {squared:.3g}"
            return f"report of shard {shard}: {what} of iteration {iteration}"
        case messages.MeanNorm(iteration, norm):
            return f"norm {norm:.3g} of the mean of iteration {iteration}"
        case actions.AbortCompute(iteration, attempt):
            return f"abort attempt {attempt} at iteration {iteration}"
        case actions.Compute(iteration, attempt):
            return f"compute iteration {iteration}{f', attempt {attempt}' if attempt else ''}"
        case actions.Send(to, message):
            return f"send {to} the {to_text(message)}"
        case actions.Measure(iteration, handles):
            return f"measure iteration {iteration} of workers {', '.join(source_name(handle) for handle in handles)}"
        case actions.Apply(handles, weight, version, norm):
            which = " and ".join(f"{handle.iteration} of worker {source_name(handle)}" for handle in handles)
            measured = f", of norm {norm:.3g}" if norm is not None else ""
            return f"apply iteration {which} at weight {weight:.3g}{measured}, making version {version}"
        case actions.Drop(handle, reason):
            what = to_text(messages.Push(handle) if handle.nbytes else messages.Update(handle))
            return f"drop the {what}: {reason}"
        case actions.Answer(parameters, reason, released_by):
            by = f", by worker {released_by}" if released_by >= 0 else ""
            return f"answer {to_text(parameters)}{f' (was parked: {reason}{by})' if reason else ''}"
        case actions.Park(pull, reason):
            return f"park the {to_text(pull)}: {reason}"
        case actions.SetTimer(timer, after_s):
            return f"set timer {timer} to fire in {after_s:.3g} s"
        case _:
            assert_never(thing)
