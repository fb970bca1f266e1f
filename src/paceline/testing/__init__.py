"""A fake wire that joins the machines of a policy, and a judge that watches: no clock, no sockets, no torch.

    story = play(SSP(staleness=2), workers=4, iterations=10, seed=7)

plays one random run and raises `PolicyBroken` if the policy broke a rule. Equal seeds give equal runs, so the
seed in the error is all it takes to see the failure again, and `error.story.trace` holds every step.

What is random (`wire.py`). Each (sender, receiver) link is first in, first out, and has its own pace; computing
takes as long as it likes. With `faults`, workers are killed: what they had sent may still arrive (a ghost), cut
off after a random prefix of each link; what they had not sent never does. Some are only *thought* dead and go on.
The same rank comes back under the next incarnation, often before anybody noticed that it had gone, and new
ranks join. One authority numbers the views; each receiver gets each view after a delay of its own, so a join
overtakes a loss. A push may arrive twice, the second time much later; so may a pull, a notice and a re-sync. A slice
may be rejected. Servers are killed that forget nothing (`--durable`): what was on its way to them or from them is lost,
and whoever waits says again what it said last (`PullRepeated`). A worker that is to compute iteration `iterations` is
done and leaves.

Timers fire when they are due. A policy that wants the significance of pushes is given random ones.

What is judged (`ledger.py`), from what was delivered and the policy's `finishes`, never from the machines' fields:

- *hang*: when nothing is in flight any more, every live worker has reached the last iteration;
- *parked*: a pull is answered or parked at once, and stays parked only while some other live member has not
  passed what the puller has: once all of them have pushed, or promised to skip, every iteration below the one
  asked for, there is nothing to wait for. So a wait for c lasts at most the sum of c - next[x] pushes, over
  the members x with next[x] < c, and a death only shortens it. `patience` adds to c, for a policy that lets
  others run ahead of a parked worker (a planned barrier);
- *handles*: each gradient that arrived is consumed once, by `Apply` or `Drop`, and none is left at the end.
  None that did not arrive, or came from a stranger, or was rejected, is applied;
- *late*: a good gradient of a live member is dropped only if its iteration was finished before it came, and not
  because a change of policy had moved V past it;
- *bound* (a policy whose `bound` s is a number): an answer for iteration c leaves no live member
  of that shard's view below c - s, and a worker starts c only on such answers, from every shard;
- *mean* (not `on_arrival`): one `Apply` is of one iteration, finished by this very event, and all its
  gradients were computed on exactly the version it changes: staleness 0. (The first mean after a change of
  policy is of gradients computed under the one before, and those it made late come in between);
- *weight*: a step on arrival is taken with 1/N, N being the live members and those that have finished (a worker that
  is lost gives its share up), or with 1 under `scale=none`; a mean with the live members' share of N. In a `weighted`
  run, where gradients stand for unequal numbers of samples, shares are those of everybody's latest push;
- *in step* (a policy that says so): at a step every live member that was ever answered has pushed what it was to
  compute, so nobody reads the parameters while they change;
- *enough* (a policy with an `extra` b): a step is on the gradients of exactly min(N - b, expected) live members,
  N as configured, expected being those that have not skipped the iteration. Without faults that is N - b, always.
  Those of members lost since come on top; a rejected slice takes the place of one;
- *answer*: once to each pull of a member, not to a copy of it unless the answer was lost with its server, for at least
  the iteration asked for, with the shard's version, saying truly whether the worker's last push was dropped.

- *fresh*: a gradient was computed on the parameters that its shard gave its worker last;
- *abort*: a computation is aborted only while it runs, and an iteration once at most; if it is begun again, then
  after that. (The abort may come too late, and the gradient all the same.) A second pull for it is not parked;
- *together* (a policy that `has_scheduler`): a shard reports its V as it is, and the scheduler releases a worker
  only when the policy's pull condition holds for the smallest V of all shards;
- *stop* (a policy whose scheduler sends plans): while some member in the last plan a shard was told is not at its
  stop, that shard answers nobody who asks for its stop or more, nor whoever is not in the plan; and it parks nobody
  else.

- *norm* (with `clips_mean`, on several shards): each step on a mean is preceded by one order to measure the very same
  gradients, when their iteration is finished, and has the norm of that iteration's means over all shards. While it is
  not known V has not risen, and what comes for V is late; whoever joins meanwhile is not waited for in V (*bound*
  leaves it out). *In step* is not judged then: only a single shard is read where it is stepped.

Whatever a machine raises, its own `check()` included, is rule *machine*. Write a policy, then play it a
thousand times: a condition that is wrong in one interleaving of a thousand shows within seconds.

Policies without servers are played by `play_peers` (`peers.py`), which has its own list of rules.
"""

from __future__ import annotations

from paceline.core.messages import Members
from paceline.core.policy import CentralPolicy
from paceline.core.trace import Header
from paceline.testing.peers import play_peers
from paceline.testing.story import PolicyBroken, Story
from paceline.testing.wire import MachineFactory, Run

__all__ = ["MachineFactory", "PolicyBroken", "Story", "play", "play_peers"]


def play(
    policy: CentralPolicy,
    *,
    workers: int,
    servers: int = 3,
    iterations: int = 10,
    seed: int,
    faults: bool = True,
    patience: int = 0,
    machine_factory: MachineFactory | None = None,
    clips_mean: bool = False,
    weighted: bool = False,
) -> Story:
    """Plays one random run to its end. Raises `PolicyBroken` if the policy broke a rule."""
    members = Members(workers, servers)
    policy.validate(members)
    header = Header("testing", str(policy), members, seed, (8,) * servers, clips_mean)
    run = Run(policy, header, iterations, patience, machine_factory or policy.machine)
    run.weighted = weighted
    return run.play(faults)
