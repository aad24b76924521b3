"""What the machine is told: facts of the past, one frozen dataclass each.

A *worker* is a process with a name that is never used twice (``host:slot.incarnation``); a
*slot* is a place for one, ``(host, index)``. Times are not part of an event: the caller of
:meth:`hvd_elastic.control.machine.RunMachine.handle` says when it was told.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvd_elastic.control.commands import Member


@dataclass(frozen=True)
class HostSlots:
    """One line of the hostfile: a machine and how many workers it may hold."""

    name: str
    slots: int


@dataclass(frozen=True)
class HostsChanged:
    """The hostfile as it is now, its order kept."""

    hosts: tuple[HostSlots, ...]


@dataclass(frozen=True)
class HostDraining:
    """A host of the hostfile will go, or shall be empty: nothing is started there any more.

    Args:
        host: where.
        cause: in words.
        train_for_s: how long its workers may still train while others become warm [s]; None:
            there is no hurry, and it is treated as if it had left the hostfile.
        leave_in_s: when it goes, as it was told [s]; None: nobody said.
        asked: the user asked for it; else the host gave notice.
    """

    host: str
    cause: str
    train_for_s: float | None = None
    leave_in_s: float | None = None
    asked: bool = False


@dataclass(frozen=True)
class HostReturned:
    """A host that was drained may be used again."""

    host: str


@dataclass(frozen=True)
class StateSaved:
    """A checkpoint of the state after ``step`` steps is complete, and where the leader keeps it."""

    step: int


@dataclass(frozen=True)
class TargetChanged:
    """Somebody asked for ``np`` workers; None gives the choice back to the configuration.

    Args:
        np: how many.
        slots: (host, index) of those that should hold them, where they can be used; empty leaves
            the choice to the order of the hostfile.
    """

    np: int | None
    slots: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class AgentReady:
    """The agent of ``host`` answers and can start workers."""

    host: str


@dataclass(frozen=True)
class AgentFailed:
    """The agent of ``host`` could not be started.

    Args:
        host: where.
        cause: in a sentence that names the host, said once.
        fatal: trying again cannot help.
        unknown: the host's name means nothing here; that mends itself seldom, and never soon.
        brief: the cause in a few words that may follow the name of one host or of several.
    """

    host: str
    cause: str
    fatal: bool = False
    unknown: bool = False
    brief: str = "cannot be used"


@dataclass(frozen=True)
class AgentLost:
    """A running agent ended or went silent: all workers of its host are gone for this run.

    Not said of an agent that was told to stop.
    """

    host: str
    cause: str
    silent_s: float | None = None


@dataclass(frozen=True)
class FoundWorker:
    """A worker of a run that lost its leader, as that leader knew it.

    Args:
        worker, host, slot: its name and place.
        ready: it was warm once.
        generation, joined: the last one it was announced into, and the last one it joined.
        waiting: it broke off or was held since.
        holds_state, step, state: whether its state is whole; how far it was when it began to wait,
            as in :class:`WorkerBroken`.
        finished: its training function returned.
        leaving: it was told to leave or killed.
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


@dataclass(frozen=True)
class RunTakenOver:
    """A new leader's first event: what is there of the run already.

    Args:
        hosts: the hostfile.
        agents: hosts whose agents answer.
        awaited: hosts whose agents were asked for and have not answered yet.
        generation, members: the last one that was announced.
        requested_np: the size that was asked for while the run went on; None: none.
        slots: those that were asked for with it.
        draining: hosts that were drained and not given back.
        workers: those that were found.
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


@dataclass(frozen=True)
class WorkerReady:
    """A standby: script imported, model built, waiting for its first announcement."""

    worker: str
    warm_s: float


@dataclass(frozen=True)
class WorkerExited:
    """The process ended, with an exit status or by a signal."""

    worker: str
    code: int | None = None
    signal: int | None = None


@dataclass(frozen=True)
class WorkerJoined:
    """A member has its communicator and the synchronised state of ``generation``."""

    worker: str
    generation: int


@dataclass(frozen=True)
class WorkerBroken:
    """A member's collectives or its rendezvous failed; it waits for the next announcement.

    Every member of a generation that was called off says this (or WorkerHeld, or ends), also one
    that had not yet begun to join it.

    Args:
        worker: who.
        generation: the one it broke off, or passed over because it was called off.
        step: optimizer steps its live state has taken; -1: it holds no whole state (the
            synchronisation was interrupted, or it never had one).
        cause: in words, for the log.
        state: orders the states of one step; the higher is the newer one.
    """

    worker: str
    generation: int
    step: int
    cause: str = ""
    state: int = 0


@dataclass(frozen=True)
class WorkerHeld:
    """A member stopped at a step boundary because it was told to hold; its state is kept."""

    worker: str
    generation: int
    step: int
    state: int = 0


@dataclass(frozen=True)
class WorkerSilent:
    """A process lives and is of no use: frozen, or stuck; ``cause`` in words."""

    worker: str
    cause: str


@dataclass(frozen=True)
class GenerationStuck:
    """The members of ``generation`` wait for each other in vain; ``cause`` in words.

    ``by_script``: they are in different places of the script, so another generation would not help.
    """

    generation: int
    cause: str
    by_script: bool = False


@dataclass(frozen=True)
class WorkerFinished:
    """The training function of a member returned."""

    worker: str


@dataclass(frozen=True)
class ScriptFailed:
    """The training script raised; the process is about to end."""

    worker: str
    traceback: str


@dataclass(frozen=True)
class StopRequested:
    """Ctrl-C, ``stop RUN``, SIGTERM; ``status`` is the one the run shall end with."""

    reason: str
    status: str = "stopped"


@dataclass(frozen=True)
class Tick:
    """Time went on: a deadline of the machine passed."""


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
"""What is said by or about one worker, in the order it happened."""

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
