"""Events that the machine handles: facts about the past, one frozen type each.

A *worker* is a process with a unique name, ``host:slot.incarnation``; a *slot* is a place for one,
``(host, index)``. Events carry no time: the caller passes it to
:meth:`hvd_elastic.control.state_machine.RunMachine.handle`.
"""

from __future__ import annotations

import msgspec

from hvd_elastic.control.commands import Member
from hvd_elastic.run_events import HostSlots, Status


class HostsChanged(msgspec.Struct, frozen=True):
    """The hostfile was read; it has these hosts, in this order."""

    hosts: tuple[HostSlots, ...]


class HostDraining(msgspec.Struct, frozen=True):
    """A host will be lost or has to be vacated, so no worker is started on it any more.

    Args:
        train_for_s: how long its workers may train on while replacements start [s]; None: there
            is no hurry, and the host is treated as if it had left the hostfile.
        leave_in_s: time until the host is lost, as announced [s]; None: not announced.
        asked: True if the user requested it, False if the host announced its preemption.
    """

    host: str
    cause: str
    train_for_s: float | None = None
    leave_in_s: float | None = None
    asked: bool = False


class HostReturned(msgspec.Struct, frozen=True):
    """A host that was drained may be used again."""

    host: str


class StateSaved(msgspec.Struct, frozen=True):
    """The leader has stored a complete checkpoint of the state after ``step`` steps."""

    step: int


class TargetChanged(msgspec.Struct, frozen=True):
    """The user or the policy requested another number of workers.

    Args:
        np: number of workers; None returns the choice to the configuration.
        slots: preferred slots (host, index); empty: slots are chosen in the hostfile's order.
    """

    np: int | None
    slots: tuple[tuple[str, int], ...] = ()


class AgentReady(msgspec.Struct, frozen=True):
    """The agent of ``host`` answers and can start workers."""

    host: str


class AgentFailed(msgspec.Struct, frozen=True):
    """The agent of ``host`` could not be started.

    Args:
        cause: a sentence that names the host; shown once.
        fatal: whether trying again is useless.
        unknown: whether the host's name cannot be looked up, which rarely resolves itself.
        brief: the cause in a few words that can follow the name of one host or of several.
    """

    host: str
    cause: str
    fatal: bool = False
    unknown: bool = False
    brief: str = "cannot be used"


class AgentLost(msgspec.Struct, frozen=True):
    """A running agent ended or fell silent without being asked to stop.

    All workers of its host are lost to the run. ``silent_s``: silence [s]; None: its connection
    ended.
    """

    host: str
    cause: str
    silent_s: float | None = None


class FoundWorker(msgspec.Struct, frozen=True):
    """A worker found at a takeover, as the earlier leader knew it.

    Args:
        ready: whether it has become warm.
        generation, joined: last generation it was announced into, and last one it joined.
        waiting: whether it has left that generation since, and waits for the next one.
        holds_state, step, state: whether its state is complete, and the state's step and order, as
            in :class:`WorkerBroken`.
        leaving: whether it was asked to leave, or killed.
        killed: why it was killed; empty: it was not.
    """

    worker: str
    host: str
    slot: int
    ready: bool = False
    generation: int = 0
    joined: int = 0
    waiting: bool = False
    holds_state: bool = False
    step: int = 0
    state: int = 0
    finished: bool = False
    leaving: bool = False
    killed: str = ""


class RunTakenOver(msgspec.Struct, frozen=True):
    """A leader took over a run; always its first event.

    Args:
        agents: hosts whose agents have answered.
        awaited: hosts whose agents are being started and have not answered yet.
        generation, members: number and members of the last announced generation.
        requested_np: size that was requested while the run continued; None: none.
    """

    hosts: tuple[HostSlots, ...]
    agents: tuple[str, ...] = ()
    awaited: tuple[str, ...] = ()
    generation: int = 0
    members: tuple[Member, ...] = ()
    requested_np: int | None = None
    slots: tuple[tuple[str, int], ...] = ()
    draining: tuple[str, ...] = ()
    workers: tuple[FoundWorker, ...] = ()


class WorkerReady(msgspec.Struct, frozen=True):
    """A worker is warm: its script is imported, its model built, and it waits to join."""

    worker: str
    warm_s: float


class WorkerExited(msgspec.Struct, frozen=True):
    """A worker's process ended, with exit status ``code`` or by ``signal``.

    ``out_of_memory``: the signal was sent by the kernel for lack of memory.
    """

    worker: str
    code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False


class WorkerJoined(msgspec.Struct, frozen=True):
    """A member has its communicator and the synchronized state of ``generation``."""

    worker: str
    generation: int


class WorkerBroken(msgspec.Struct, frozen=True):
    """A collective or the rendezvous of a member failed; it waits for the next announcement.

    Every member of an aborted generation sends this or WorkerHeld, or ends; even a member that had
    not begun to join.

    Args:
        generation: generation that broke, or that it skipped because it was aborted.
        step: number of optimizer steps in its state; -1: it holds no complete state, because the
            synchronization was interrupted or it never had one.
        state: orders states of the same step; the higher is the newer.
    """

    worker: str
    generation: int
    step: int
    cause: str = ""
    state: int = 0


class WorkerHeld(msgspec.Struct, frozen=True):
    """A member stopped at a step boundary after a Hold and keeps its state."""

    worker: str
    generation: int
    step: int
    state: int = 0


class WorkerSilent(msgspec.Struct, frozen=True):
    """A worker's process exists but is frozen or stuck; ``cause``: text for the log."""

    worker: str
    cause: str


class GenerationStuck(msgspec.Struct, frozen=True):
    """All members of ``generation`` wait for each other; ``cause``: text for the log.

    ``by_script``: they wait in different collectives, so another generation would not help.
    """

    generation: int
    cause: str
    by_script: bool = False


class WorkerFinished(msgspec.Struct, frozen=True):
    """A member's training function returned."""

    worker: str


class ScriptFailed(msgspec.Struct, frozen=True):
    """The training script raised an exception; the worker's process is about to end."""

    worker: str
    traceback: str


class StopRequested(msgspec.Struct, frozen=True):
    """The end of the run was requested; ``status`` is the result it should end with."""

    reason: str
    status: Status = "stopped"


class Tick(msgspec.Struct, frozen=True):
    """A deadline of the machine has passed."""


WorkerEvent = (
    WorkerReady
    | WorkerExited
    | WorkerJoined
    | WorkerBroken
    | WorkerHeld
    | WorkerFinished
    | WorkerSilent
    | ScriptFailed
)
"""Events about one worker, delivered in the order in which they happened."""

Event = (
    HostsChanged
    | HostDraining
    | HostReturned
    | StateSaved
    | TargetChanged
    | AgentReady
    | AgentFailed
    | AgentLost
    | GenerationStuck
    | RunTakenOver
    | StopRequested
    | Tick
    | WorkerEvent
)
