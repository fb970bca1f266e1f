"""The parts of a live run: what each is made of, who hears which message, and who is asked how often."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline import private_files
from paceline.cluster import to_table
from paceline.core.control.admission import Admitter
from paceline.core.control.server_resizing import ServerResizer
from paceline.core.control.server_restarts import ServerRestarter
from paceline.core.control.worker_restarts import WorkerRestarter
from paceline.run import Point
from paceline.runtime.live.driver.admission import Admission, Welcome
from paceline.runtime.live.driver.agent_conversations import AgentConversations
from paceline.runtime.live.driver.agent_reports import AgentReports
from paceline.runtime.live.driver.beginning import Beginning, ModelSetup
from paceline.runtime.live.driver.checkpointing import Checkpointer, find_resumed
from paceline.runtime.live.driver.children import Child
from paceline.runtime.live.driver.coordinators import Coordinators
from paceline.runtime.live.driver.durability import Durability
from paceline.runtime.live.driver.fault_injection import FaultInjector
from paceline.runtime.live.driver.feed_file import FeedFile
from paceline.runtime.live.driver.finishing import Finishing
from paceline.runtime.live.driver.folder_guard import FolderGuard
from paceline.runtime.live.driver.health import HealthMonitor
from paceline.runtime.live.driver.host_arrivals import HostArrivals
from paceline.runtime.live.driver.key_registry import KeyRegistry
from paceline.runtime.live.driver.logged_metrics import LoggedMetrics
from paceline.runtime.live.driver.lr_scheduler_states import LRSchedulerStates
from paceline.runtime.live.driver.mailbox import Mailbox
from paceline.runtime.live.driver.messenger import Messenger
from paceline.runtime.live.driver.peer_setup import PeerSetup
from paceline.runtime.live.driver.peers import PeerEndpoints, PeerPlaces, Peers
from paceline.runtime.live.driver.processes import Children, ProcessStarter, Workers
from paceline.runtime.live.driver.remote_hosts import RemoteHosts
from paceline.runtime.live.driver.requests_taken import Requests
from paceline.runtime.live.driver.roster import Roster
from paceline.runtime.live.driver.run_plan import RunPlan
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.driver.sample_dispatchers import SampleDispatchers
from paceline.runtime.live.driver.script_barrier import ScriptBarrier
from paceline.runtime.live.driver.script_ends import ScriptEnds
from paceline.runtime.live.driver.server_placement import ServerPlacement
from paceline.runtime.live.driver.server_resizing import ResizeLimits, ServerResizing
from paceline.runtime.live.driver.server_restarts import ServerRestarts
from paceline.runtime.live.driver.server_startup import ServerStartup
from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.driver.shutdown_signals import ShutdownSignals
from paceline.runtime.live.driver.time_limits import TimeLimits
from paceline.runtime.live.driver.waited_for import WaitedFor
from paceline.runtime.live.driver.worker_output import WorkerOutput
from paceline.runtime.live.driver.worker_restarts import WorkerRestarts
from paceline.runtime.live.messaging.unix_sockets import Listener, Waiter
from paceline.runtime.live.protocol import (
    lease_messages,
    requests,
    resizing_messages,
    round_messages,
    script_calls,
    wire,
)
from paceline.runtime.live.protocol.configuration import LiveConfig
from paceline.runtime.live.storage import endpoints

LAST_WORDS_S = 0.2
"""How long a server that has ended may take to be heard."""


@dataclass(frozen=True)
class Parts:
    """What a live run is made of, as far as the driver or somebody who watches it speaks to it."""

    folder: Path
    mailbox: Mailbox
    interrupts: ShutdownSignals
    state: RunState
    roster: Roster
    children: Children
    workers: Workers
    worker_restarts: WorkerRestarts
    servers: Servers
    server_restarts: ServerRestarts
    resizing: ServerResizing
    durability: Durability
    checkpointer: Checkpointer | None
    coordinators: Coordinators
    peers: Peers
    health: HealthMonitor
    logged: LoggedMetrics
    feed: FeedFile
    sample_dispatchers: SampleDispatchers
    beginning: Beginning
    finishing: Finishing
    guard: FolderGuard
    conversations: AgentConversations | None
    """With the agents of other hosts, if the run has some."""
    ended: Callable[[Child], None]
    """Takes a process that has ended."""
    ticks: tuple[Callable[[], None], ...]
    """What is to be called in every turn."""


def assemble(
    plan: RunPlan,
    folder: Path,
    traces: Path,
    resources: contextlib.ExitStack,
    say: Callable[[str], None],
    watch: Callable[[Point], None] | None,
    say_error: Callable[[str], None],
) -> Parts:
    """Makes the parts of a run in this folder, which write their traces there. `resources` closes what they open."""
    _write_config(plan, folder, traces)
    waiter = Waiter()
    resources.callback(waiter.close)
    listener = Listener(folder / "driver")
    resources.callback(listener.close)
    waiter.watch(listener)
    interrupts, state, roster = ShutdownSignals(), RunState(plan.policy), Roster()
    hosts = None
    if plan.meeting is not None:
        hosts = RemoteHosts(plan.meeting, folder, state)
        resources.callback(hosts.listener.close)
        waiter.watch(hosts.listener)
    messenger = Messenger(listener, hosts)
    output = WorkerOutput(waiter, say, say_error)
    kept = plan.checkpointing.folder if plan.checkpointing is not None else None
    feed = FeedFile(kept, state)
    resources.callback(feed.close)
    say = feed.telling(say)  # but not what workers print
    children = Children(waiter, output)
    starter = ProcessStarter(plan.starter, folder, hosts, children)
    servers = Servers(plan.members.servers, starter.server, messenger.to_server)
    has_keys = plan.multihost is not None and plan.multihost.keys
    keys = KeyRegistry(servers, has_keys, folder if hosts is None else None)
    workers = Workers(children, roster, starter, keys, messenger, state)

    def take_point(point: Point) -> None:
        feed.log(point)
        if watch is not None:
            watch(point)

    logged = LoggedMetrics(plan.target, take_point, workers.stop, say)
    coordinators = Coordinators(folder, plan.seed, state.now, messenger, hosts.ring if hosts is not None else None)

    resumed = find_resumed(plan.checkpointing, say)
    sample_dispatchers = SampleDispatchers(resumed.epochs, state.now, messenger.to_worker, lambda: state.stage.policy)
    durability = Durability(plan.checkpointing, folder / "others", say)
    schedulers = LRSchedulerStates(roster, resumed.schedulers, durability.keep_schedulers)

    def order_checkpoint(part: Path) -> tuple[dict[int, int], bytes]:
        servers.tell_all(wire.Checkpoint(str(part)))
        return sample_dispatchers.unfinished(), schedulers.now

    def can_checkpoint() -> bool:
        servers_hear = servers.all_configured and not resizing.under_way
        return state.begun and not state.finishing and servers_hear and not state.without_servers

    checkpointer = None
    if plan.checkpointing is not None:
        others = folder / "others"
        checkpointer = Checkpointer(plan.checkpointing, resumed, order_checkpoint, can_checkpoint, others, state, say)

    described: dict[tuple[int, int], wire.Describe] = {}
    peer_endpoints = PeerEndpoints(plan.multihost is not None, described, keys)
    places = PeerPlaces(state, plan.members.workers)
    peers = Peers(
        state, roster, workers, peer_endpoints, messenger.to_worker, sample_dispatchers.announce, folder
    )  # fmt: skip
    peer_setup = PeerSetup(plan, folder, children, hosts, servers, checkpointer, say)
    health = HealthMonitor(
        plan.care.hang_timeout_s, state, roster, workers.live, servers, peers.done, lambda: coordinators.waits, say
    )
    limits = ResizeLimits(state, plan.members.workers, servers, durability, hosts)
    resizing = ServerResizing(
        ServerResizer(plan.members.servers), state, roster, servers, messenger, limits, coordinators, health,
        checkpointer, folder, lambda: admission.admit_waiting(), say,
    )  # fmt: skip
    needed = plan.members.workers if hosts is not None else 0
    barrier = ScriptBarrier(state, roster, workers, needed, servers, messenger.to_worker, health.excuse, say)
    placement = ServerPlacement(plan.servers_on, plan.obstacle_to_devices, described, say)
    startup = ServerStartup(
        servers, state, roster, messenger, keys, durability, checkpointer, resizing, barrier, health, placement
    )  # fmt: skip
    welcome = Welcome(
        state, roster, messenger, servers, resizing, peers, peer_setup, health, schedulers,
        plan.checkpointing is not None and plan.checkpointing.resume,
    )  # fmt: skip
    admission = Admission(
        Admitter(time.monotonic(), needed), state, roster, workers, messenger, places, resizing, welcome, described,
        lambda order: beginning.execute(order), say,
    )  # fmt: skip
    fault_injector = FaultInjector(plan.cluster, state, workers, messenger, resizing.want)
    has_place = hosts.has_home if hosts is not None else lambda rank: True
    joined = plan.meeting is not None and bool(plan.meeting.join)
    worker_restarter = WorkerRestarter(plan.care.restarts, plan.care.abort, joined)
    outcomes = worker_restarter.outcomes
    worker_restarts = WorkerRestarts(
        worker_restarter, state, roster, workers, fault_injector, has_place, health, keys, folder, say
    )
    script_ends = ScriptEnds(state, roster, workers, peers, health, say)
    model_setup = ModelSetup(plan, state, admission, startup, peer_setup, coordinators, checkpointer, placement)

    def note_beginning() -> None:
        count = 0 if state.without_servers else servers.count
        feed.begin(plan.members.workers, count, state.model.layout.slice_bytes(max(1, count)), plan.target)

    beginning = Beginning(
        model_setup, state, admission, servers, worker_restarts, checkpointer, durability, outcomes, folder, say,
        note_beginning,
    )  # fmt: skip
    finishing = Finishing(state, servers, resizing, checkpointer, outcomes, folder, beginning.never_began, say)
    server_restarts = ServerRestarts(
        ServerRestarter(),
        servers, state, durability, checkpointer, resizing,
        lambda shard: mailbox.hear_until(lambda: shard in servers.finished, LAST_WORDS_S), say,
    )  # fmt: skip
    time_limits = TimeLimits(plan.care, state, interrupts, servers, hosts is None)

    def look_after_folder() -> None:
        durability.lose_logs()
        if checkpointer is not None:
            checkpointer.folder_was_lost()
        feed.begin_again()

    guard = FolderGuard(kept, folder, traces, look_after_folder, say)

    roster.follow(peers.announce)
    roster.follow(coordinators.announce)
    roster.follow(lambda view: servers.tell_configured(wire.NewView(view)))

    def child_ended(child: Child) -> None:
        code = children.collect(child)
        if child.role == "server":
            server_restarts.ended(child, code)
        else:
            worker_restarts.take(child, code)

    def take_leave(leave: wire.Leave) -> None:
        script_ends.take_leave(leave)
        barrier.take_leave(leave)
        if leave.stays:
            peers.take_done(leave)
        else:
            roster.remove(leave.rank, leave.incarnation, leave.finished)

    waited_for = WaitedFor(kept, say)

    def take_status(status: wire.Status) -> None:
        health.take_status(status)
        if not status.shard and state.begun and not state.stopping:
            waited_for.look({rank: seen for rank, seen in health.status.items() if rank in roster.members})

    def take_peer_status(status: wire.PeerStatus) -> None:
        if peers.take_status(status):
            health.take_peer(status)

    def take_due(message: wire.Due) -> None:
        if checkpointer is not None:
            checkpointer.begin_if_possible()

    def take_saved(message: wire.Saved) -> None:
        if checkpointer is not None and state.configured:
            checkpointer.saved(message, servers.assignment)

    def take_finished(message: wire.Finished) -> None:
        servers.finished.add(message.shard)
        durability.finished(message.cost)

    asked = Requests(state, interrupts, checkpointer, messenger.answer)
    handlers: dict[type, Callable[[Any], object]] = {
        wire.Describe: admission.take,
        lease_messages.LeaseEvents: sample_dispatchers.hear,
        wire.Log: logged.take,
        wire.Leave: take_leave,
        wire.Without: peers.go_without,
        wire.Ready: startup.ready,
        wire.Rejected: health.take_rejected,
        wire.Status: take_status,
        wire.PeerStatus: take_peer_status,
        wire.Due: take_due,
        wire.Saved: take_saved,
        wire.Finished: take_finished,
        wire.Undurable: durability.take,
        resizing_messages.Want: resizing.want,
        resizing_messages.Held: resizing.take_held,
        resizing_messages.Standing: resizing.take_standing,
        resizing_messages.Gave: resizing.take_gave,
        wire.Ask: coordinators.hear_scheduler,
        wire.Measured: coordinators.hear_reducer,
        round_messages.Begun: coordinators.hear_planner,
        script_calls.EndRun: script_ends.take_request,
        script_calls.AtBarrier: barrier.enter,
        script_calls.Awaited: barrier.take_awaited,
        script_calls.LRSchedulerStates: schedulers.take,
        requests.StopAsked: asked.stop,
        requests.CheckpointAsked: asked.checkpoint,
    }
    mailbox = Mailbox(waiter, listener, handlers)
    conversations = None
    if hosts is not None:
        arrivals = HostArrivals(
            hosts, state, plan.members, places, workers, child_ended, lambda: worker_restarts.due, say
        )
        reports = AgentReports(
            folder, arrivals, state, keys, servers, checkpointer, admission, mailbox.hear, child_ended, say
        )  # fmt: skip
        conversations = AgentConversations(hosts, arrivals, reports, waiter)
    ticks = [
        fault_injector.tick, resizing.tick, worker_restarts.tick, servers.tick, guard.tick, time_limits.tick,
        health.tick, peers.tick, script_ends.tick, barrier.tick, feed.tick,
    ]  # fmt: skip
    if checkpointer is not None:
        ticks.append(checkpointer.tick)
    return Parts(
        folder, mailbox, interrupts, state, roster, children, workers, worker_restarts, servers, server_restarts,
        resizing, durability, checkpointer, coordinators, peers, health, logged, feed, sample_dispatchers, beginning,
        finishing, guard, conversations, child_ended, tuple(ticks),
    )  # fmt: skip


def _write_config(plan: RunPlan, folder: Path, traces: Path) -> None:
    """Leaves what all processes of the run read first."""
    config = LiveConfig(
        plan.members,
        plan.seed,
        to_table(plan.cluster) if plan.cluster is not None else None,
        str(traces),
        plan.slicing,
        str(plan.policy) if plan.policy is not None else None,
        plan.checkpointing is not None,
        secrets.token_hex(8),
        plan.multihost,
        local_steps=plan.local_steps,
        servers_on="cpu" if plan.obstacle_to_devices else plan.servers_on,
    )
    private_files.write(folder / "config", msgspec.json.encode(config))
    if plan.multihost is not None:
        endpoints.make_nonce(folder)
