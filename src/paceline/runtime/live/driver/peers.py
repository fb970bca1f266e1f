"""The driver's side of a run without servers: views go to the peers, and what they leave is averaged.

A peer that has done its iterations stays a member until all are done, and its process stays too: as in virtual time
others still average what it has sent, and it answers them. Then a last view, without anybody, lets all go. If the
script gives peers unequal numbers of iterations, one may come to wait for what a peer that is done never sends; it says
so, and that peer leaves then. Slower ones may not have averaged all it had sent; that is lost to them, as when somebody
crashes: who waits would have to wait for all of them otherwise. Whoever crashes leaves at once.

A peer that ends well leaves its parameters in the run's folder; the model of the run is the average of those. A
checkpoint is that average too, and what the optimizers had learned, in the mean: a run that goes on from one starts
all peers with it.

Whoever joins gets parameters from a neighbour. If all who had some are gone, nobody can begin any more: then the run is
over, well if some had come to their end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from msgspec import Struct, structs
from safetensors.torch import save_file
from torch import Tensor

from paceline import serverless
from paceline.core.messages import Members, View
from paceline.core.policy import PeerPolicy
from paceline.core.topology import Topology
from paceline.errors import RunFailed
from paceline.runtime.live import checkpoint, memory, wire
from paceline.runtime.live.configuration import Door
from paceline.runtime.live.driver.harvest import readable
from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.peer.slots import Process
from paceline.tensors import state
from paceline.tensors.layout import Layout
from paceline.tensors.slices import THERE
from paceline.tensors.steppers import SCALARS, State

if TYPE_CHECKING:
    from paceline.runtime.live.driver.launch import Driver

BEREFT_S = 2.0
"""How long a peer that has just got its parameters may take to say so, when all others are gone."""
ONLY_SHARD = 0
ITERATION, VALUES, LEARNED = "iteration", "values", "state."


class Final(Struct):
    """The average of what peers have left."""

    values: Tensor
    learned: State
    iteration: int
    count: int
    distance: float
    """How far the peers were from it, in the mean."""


class Peers:
    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.holding: set[Process] = set()
        """Members that have parameters."""
        self.done: set[Process] = set()
        """Members that have done their iterations."""
        self.graph: Topology | None = None
        """As it was when the run began: a file may be written anew."""
        self.before = 0
        """Iterations of the run that this one goes on from."""
        self.bereft_s: float | None = None
        """Since when no member has any."""

    @property
    def active(self) -> bool:
        """Whether the run is one without servers."""
        return isinstance(self.driver.policy, PeerPolicy)

    def prepare(self) -> None:
        """The policy is known, and has no servers: what was started for one that has is let go."""
        driver, plan, policy = self.driver, self.driver.plan, self.driver.policy
        assert isinstance(policy, PeerPolicy)
        serverless.refuse_servers(policy, plan.servers_asked, plan.slicing)
        serverless.check_live_scenario(policy, plan.cluster, driver.members)
        self.graph = policy.topology(driver.members.workers)
        if warning := serverless.warning_of(policy, driver.members.workers):
            driver.say(f"warning: {warning}")
        for child in [child for child in driver.children.values() if child.role == "server"]:
            del driver.children[child.sentinel]
            if driver.hosts is None or not driver.hosts.release(child):
                driver.waiter.forget(child.sentinel)
            child.kill()
            child.reap()
        driver.members = Members(driver.members.workers, 0)
        driver.servers = Servers(driver, 0)
        keeper = driver.keeper
        if keeper is None:
            return
        keeper.keeping.check(policy)
        if keeper.keeping.resume and keeper.last is not None:
            self._resume(keeper.last)

    def _resume(self, path: Path) -> None:
        """Have all begin with what is in a checkpoint instead of what worker 0 has left."""
        manifest, folder = checkpoint.read(path), self.driver.folder.path
        values, learned = checkpoint.load_part(path, manifest, ((0, manifest.layout.numel),))
        memory.attach(folder / memory.WHOLE, manifest.layout).copy_(values)
        save_file(state.join([learned], manifest.layout), folder / memory.INITIAL_STATE)
        self.before = max(shard.iteration for shard in manifest.shards)

    def announce(self, view: View) -> None:
        if view.number == 1:
            self.holding.update(view.members)
        self.holding.intersection_update(view.members)
        for rank, incarnation in {*view.members, *self.done}:
            self.driver.tell_worker(rank, incarnation, wire.NewView(view, self.doors(view)))
        self.done.intersection_update(view.members)
        self._consider_ending()

    def doors(self, view: View) -> tuple[Door, ...]:
        """Where each member is, if the run crosses hosts. Whose key is whose the driver knows by itself."""
        driver = self.driver
        if driver.plan.abroad is None:
            return ()
        found = []
        for process in view.members:
            door = driver.admission.described[process].door
            assert door is not None
            found.append(structs.replace(door, key=driver.enrolling.known.get(process, "")))
        return tuple(found)

    def place(self) -> None:
        """Lay the graph out by hosts, if it is to be: ranks that follow one another on one host are together."""
        driver = self.driver
        policy, hosts = driver.policy, driver.hosts
        assert isinstance(policy, PeerPolicy)
        where = hosts.home if hosts is not None else {}
        homes = [where[rank].name if rank in where else b"" for rank in range(driver.members.workers)]
        placed = policy.placed(tuple(len(list(together)) for _, together in groupby(homes)))
        if placed != policy:
            driver.policy = placed
            driver.say(f"the graph is laid out by host: {placed}")

    def has_place(self, rank: int) -> bool:
        """Whether the graph has a place for this peer: nobody can be added to it."""
        return not self.active or rank < self.driver.members.workers

    @property
    def full(self) -> str:
        return f"the graph has places for {self.driver.members.workers} peers, and all are taken"

    def at_work(self, view: View) -> View:
        """The view without those who are done: samples they hold are for others."""
        return View(view.number, tuple(process for process in view.members if process not in self.done))

    def take_done(self, leave: wire.Leave) -> None:
        """A peer has done its iterations, and stays."""
        driver, process = self.driver, (leave.rank, leave.incarnation)
        if driver.authority.members.get(leave.rank) != leave.incarnation:
            view = driver.authority.view()
            driver.tell_worker(*process, wire.NewView(view, self.doors(view)))
            return
        self.done.add(process)
        driver.decks.announce(self.at_work(driver.authority.remove()))
        self.tell_done(*driver.authority.members.items())
        self._consider_ending()

    def tell_done(self, *to: Process) -> None:
        """Tell these who is done."""
        if self.done:
            for process in to:
                self.driver.tell_worker(*process, wire.Done(tuple(sorted(self.done))))

    def go_without(self, said: wire.Without) -> None:
        if (said.rank, said.incarnation) in self.done:
            self.driver.remove(said.rank, said.incarnation)

    def _consider_ending(self) -> None:
        """If all that are left are done, let them go."""
        members = self.driver.authority.members
        if members and self.done.issuperset(members.items()):
            self.driver.announce(self.driver.authority.remove(*list(members)))

    def hear(self, said: wire.PeerStatus) -> None:
        driver = self.driver
        if driver.authority.members.get(said.rank) == said.incarnation:
            self.holding.add((said.rank, said.incarnation))
            driver.watchman.take_peer(said)

    def tick(self) -> None:
        """See to it that nobody waits for parameters that nobody has."""
        driver = self.driver
        if not self.active or not driver.begun or self.holding or not driver.authority.members:
            self.bereft_s = None
            return
        self.bereft_s = self.bereft_s or time.monotonic()
        if time.monotonic() - self.bereft_s < BEREFT_S:
            return
        if not any(driver.folder.path.glob(final_name("*"))):
            raise RunFailed("every peer that had parameters was killed: those that joined have nobody to begin with")
        if not driver.stopping:
            driver.stop_workers("the others are done")

    def final(self) -> Final:
        """The average of what the peers that ended well have left."""
        lead = self.driver.lead
        assert lead is not None
        assert lead.layout is not None
        paths = sorted(self.driver.folder.path.glob(final_name("*")))
        left = readable(paths)
        if not left:
            raise RunFailed("no peer came to its end: nothing is left of the model")
        return average(left, lead.layout)

    def keep(self) -> None:
        """Write the checkpoint at the end."""
        driver = self.driver
        keeper, lead = driver.keeper, driver.lead
        assert keeper is not None
        assert lead is not None
        assert lead.layout is not None
        part = keeper.under_way
        if part is None:
            return
        final = self.final()
        whole = slice(0, lead.layout.numel)
        entry, error = None, ""
        try:
            learned = state.cut(final.learned, lead.layout, whole) if final.learned else {}
            entry = checkpoint.write_shard(part, ONLY_SHARD, final.values, learned, final.iteration, final.iteration)
        except OSError as problem:
            error = str(problem)
        saved = wire.Saved(str(part), ONLY_SHARD, entry, error)
        everything = (((0, lead.layout.numel),),)  # is in one file: the driver writes it
        keeper.saved(saved, str(driver.policy), lead.layout, everything, driver.folder.path / "others")


def final_name(process: str) -> str:
    return f"final-{process}"


def final_path(folder: Path, rank: int, incarnation: int) -> Path:
    """Where a peer that ends leaves its parameters."""
    return folder / final_name(f"{rank}.{incarnation}")


def leave_final(path: Path, values: Tensor, learned: State, iteration: int) -> None:
    """What a peer leaves, whole or not at all."""
    part = path.with_name(f"part-{path.name}")
    held = {LEARNED + name: value for name, value in learned.items()}
    save_file({VALUES: values, ITERATION: torch.tensor([iteration]), **held}, part)
    part.replace(path)


def average(left: Sequence[Mapping[str, Tensor]], layout: Layout) -> Final:
    """The mean of all; of counts, as steps taken, the largest."""
    values = torch.zeros(layout.numel, dtype=layout.torch_dtype)
    for each in left:
        values.add_(each[VALUES], alpha=1.0 / len(left))
    learned: State = {}
    for name in sorted({name for each in left for name in each if name.startswith(LEARNED)}):
        have = torch.stack([each[name] for each in left if name in each])
        counts = name.removeprefix(LEARNED) in (*SCALARS, THERE)
        learned[name.removeprefix(LEARNED)] = have.amax(0) if counts else have.mean(0)
    iteration = max(int(each[ITERATION].item()) for each in left)
    apart = sum(float(torch.linalg.vector_norm(each[VALUES] - values)) for each in left) / len(left)
    return Final(values, learned, iteration, len(left), apart)
