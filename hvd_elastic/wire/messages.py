"""Every message between leader, agents and workers: one type each, and one union per direction.

A message is built by its type on one side and decoded into the same type on the other, where it is
checked; see :mod:`hvd_elastic.wire.framing`. Leader and agents are of the same version, which the
leader checks when an agent says hello, so there are no optional fields for older peers.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from hvd_elastic.control.commands import Announce, Member
from hvd_elastic.control.events import FoundWorker
from hvd_elastic.control.progress import Activity, Position

PROTOCOL = 4
"""Raised with every change that an older peer would misread."""


class _Plain(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Part of a message."""


class WorkerOptions(_Plain):
    """What the leader decided for all workers; in their environment.

    Attributes:
        heartbeat_s: time between heartbeats [s].
        audit: record which examples were really read.
        checkpoint_every_s: time between checkpoints [s]; 0: none are written.
    """

    heartbeat_s: float = 1.0
    audit: bool = False
    checkpoint_every_s: float = 0.0


class StoreEntry(_Plain):
    """One value of the rendezvous store of a generation."""

    generation: int
    scope: str
    key: str
    value: bytes


class LeaderIdentity(_Plain):
    """Who leads a run.

    Attributes:
        run_id: the run.
        leader: tells it from all other leaders.
        led_by: what users call it.
        led_since: when it began to lead [Unix seconds, of its own clock].
        heard_s: how long ago an agent heard of it [s].
    """

    run_id: str
    leader: str
    led_by: str
    led_since: float
    heard_s: float = 0.0


class HeldRun(_Plain):
    """What an agent holds of a run, as the agent's last leader knew it."""

    generation: int
    members: tuple[Member, ...]
    workers: tuple[FoundWorker, ...]


class Announcement(_Plain):
    """A generation as its hosts and workers are told of it.

    Attributes:
        order: number, members and reason; its ``root`` is the member whose state all take, be it
            live or from a checkpoint.
        life: tells the generations that one leader counts from those of another.
        restore: manifest on the root's host that the root loads first; None: it has the state.
        checkpoint: manifest that ``restore`` is a copy of, for messages.
    """

    order: Announce
    life: str
    restore: str | None = None
    checkpoint: str | None = None

    @property
    def generation(self) -> int:
        """Return its number."""
        return self.order.generation

    @property
    def root_rank(self) -> int:
        """Return the rank whose state all take; 0 where nobody has one."""
        ranks = {member.worker: member.rank for member in self.order.members}
        return ranks.get(self.order.root or "", 0)


# ---- worker → agent


class _FromWorker(_Plain, tag_field="kind"):
    pass


class WorkerHello(_FromWorker, tag="hello"):
    """A worker has connected."""

    worker: str
    pid: int


class WorkerBeat(_FromWorker, tag="beat"):
    """A worker lives; ``outlived``: number of a SIGTERM or SIGHUP that it got and outlived."""

    activity: Activity = Activity()
    outlived: int = 0


class CheckpointAnswered(_FromWorker, tag="checkpoint_answered"):
    """The worker has written what it was asked for, or could not."""


# ---- worker → leader, through the agent


class WorkerReport(_FromWorker):
    """What a worker tells the leader; some of it becomes an event of the run as it is."""

    def event_fields(self) -> dict[str, Any]:
        """Return its fields, as events of the run have them."""
        fields: dict[str, Any] = msgspec.structs.asdict(self)
        return fields

    def as_event(self) -> tuple[str, dict[str, Any]]:
        """Return the kind of its event and the fields."""
        return str(self.__struct_config__.tag), self.event_fields()


class Ready(WorkerReport, tag="ready"):
    """A standby is warm."""

    warm_s: float


class Standing(WorkerReport, kw_only=True):
    """Where a member stands in a generation.

    Attributes:
        step: optimizer steps that its live state has taken; -1: its state is not whole.
        state: orders the states of one step; the higher is the newer one.
    """

    generation: int
    step: int
    state: int = 0


class Joined(Standing, tag="joined"):
    """A member has its communicator and the state."""


class Held(Standing, tag="held"):
    """A member stopped at a step boundary, as it was told."""


class Broken(Standing, tag="broken"):
    """A member's collectives or its rendezvous failed."""

    error: str
    progress: Position | None = None


class Finished(WorkerReport, tag="finished"):
    """The training function returned."""

    progress: Position


class ScriptRaised(WorkerReport, tag="script_error"):
    """The script raised; the process is about to end."""

    traceback: str
    progress: Position


class Metrics(WorkerReport, tag="metrics"):
    """Progress, speed, and what the script reports, by name."""

    progress: Position
    size: int
    values: dict[str, Any]

    def event_fields(self) -> dict[str, Any]:
        """See :meth:`WorkerReport.event_fields`."""
        return {**asdict(self.progress), "size": self.size, **self.values}


class BatchPlan(WorkerReport, tag="batch_plan"):
    """The batch at the start, and each change of it."""

    step: int
    global_batch_size: int
    atomic_batch_size: int
    accumulation_steps: int
    lr_scale: float | None
    limits: dict[str, int | None]
    reason: str


class Shares(WorkerReport, tag="shares"):
    """Examples of a full step by rank; empty: equal ones."""

    step: int
    global_batch_size: int
    shares: list[int]
    reason: str


class RescaleFinished(WorkerReport, tag="rescale_finished"):
    """The first step of a generation is done."""

    generation: int
    size: int
    pause_s: float | None


class WorkerWarning(WorkerReport, tag="warning"):
    """Something is wrong and training goes on."""

    message: str


class Restored(WorkerReport, tag="restored"):
    """The root has loaded a checkpoint."""

    progress: Position
    path: str

    def event_fields(self) -> dict[str, Any]:
        """See :meth:`WorkerReport.event_fields`."""
        return {**asdict(self.progress), "path": self.path}


class Dataset(WorkerReport, tag="dataset"):
    """Examples of the data set, and how many ``drop_last`` leaves out; for the audit."""

    n: int
    dropped: int


class Used(WorkerReport, tag="used"):
    """What all ranks really read for one step; for the audit."""

    generation: int
    step: int
    epoch: int
    position: int
    indices: list[int]
    padding: list[int]


Reading = Dataset | Used
"""What the audit records."""


class CheckpointWritten(WorkerReport, tag="checkpoint"):
    """A worker has written its shard; ``shard`` is what its description on disk says."""

    shard: dict[str, Any]
    step: int
    epoch: int
    examples: int
    path: str
    bytes: int
    seconds: float
    blocked_s: float

    def event_fields(self) -> dict[str, Any]:
        """See :meth:`WorkerReport.event_fields`."""
        names = ("shard", "step", "path", "bytes", "seconds", "blocked_s")
        return {name: getattr(self, name) for name in names}


class CheckpointFailed(WorkerReport, tag="checkpoint_failed"):
    """A worker could not write its shard."""

    message: str


_Report = (
    Ready
    | Joined
    | Held
    | Broken
    | Finished
    | ScriptRaised
    | Metrics
    | BatchPlan
    | Shares
    | RescaleFinished
    | WorkerWarning
    | Restored
    | Dataset
    | Used
    | CheckpointWritten
    | CheckpointFailed
)
WorkerToAgent = WorkerHello | WorkerBeat | CheckpointAnswered | _Report


# ---- agent → worker


class _ToWorker(_Plain, tag_field="kind"):
    pass


class Join(_ToWorker, tag="join"):
    """Take part in a generation; ``env``: Horovod's variables for this worker."""

    announcement: Announcement
    env: dict[str, str]


class Hold(_ToWorker, tag="hold"):
    """Stop at the next step boundary, keep the state and wait."""


class Leave(_ToWorker, tag="leave"):
    """Go, at the next step boundary."""


class Abort(_ToWorker, tag="abort"):
    """A generation is called off: give up its collectives."""

    generation: int


class SaveState(_ToWorker, tag="checkpoint"):
    """Have a checkpoint written."""


class Recorded(_ToWorker, tag="recorded"):
    """Up to this step it is on record what was read."""

    step: int


class End(_ToWorker, tag="end"):
    """End now if a SIGTERM was outlived."""


Instruction = Join | Hold | Leave
"""What the training thread waits for; the others are carried out at once."""

AgentToWorker = Instruction | Abort | SaveState | Recorded | End


# ---- leader → agent


class _ToAgent(_Plain, tag_field="op"):
    pass


class LeaderHello(_ToAgent, tag="hello", forbid_unknown_fields=False):
    """The first message: the run, and how it wants this host to serve it.

    Attributes:
        run_id, leader, led_by, led_since: see :class:`LeaderIdentity`.
        host: what the hostfile calls the agent's host.
        take_over: workers of an earlier leader are taken over, not ended.
        failure_timeout_s: after so much silence the leader counts as lost [s].
        leader_grace_s: how long to go on without a leader [s].
        env, cwd, command: of the workers.
        run: what the run was asked to be, for a leader that has no run folder.
        interface: network interface of the ring; None: the one with this host's own address.
        local_address: by which address the other hosts reach this one, without ssh.
        heartbeat_s: time between heartbeats [s].
        preemption_command: says whether the host will be taken away; None: nothing does.
        options: for the workers.
    """

    run_id: str
    host: str
    leader: str
    led_by: str
    led_since: float
    take_over: bool
    failure_timeout_s: float
    leader_grace_s: float
    env: dict[str, str]
    cwd: str
    command: tuple[str, ...]
    run: dict[str, Any]
    interface: str | None
    local_address: str
    heartbeat_s: float
    preemption_command: str | None
    options: WorkerOptions

    @property
    def identity(self) -> LeaderIdentity:
        """Return who says hello."""
        return LeaderIdentity(
            run_id=self.run_id,
            leader=self.leader,
            led_by=self.led_by,
            led_since=self.led_since,
        )


class LeaderBeat(_ToAgent, tag="beat"):
    """The leader lives, and has acted upon all messages up to ``acted_upon``.

    ``recorded``: up to this step it is on record what was read; None: that is not recorded.
    """

    acted_upon: int
    recorded: int | None = None


class StartWorker(_ToAgent, tag="start_worker"):
    """Start a standby; ``slots``: how many processes share the host."""

    worker: str
    local_rank: int
    slots: int


class AnnounceGeneration(_ToAgent, tag="announce"):
    """Have this host's members join a generation."""

    announcement: Announcement


class PutEntry(_ToAgent, tag="store"):
    """Another host has added a value to the rendezvous store."""

    entry: StoreEntry


class CallOff(_ToAgent, tag="abort"):
    """A generation is called off."""

    generation: int


class Tell(_ToAgent, tag="tell"):
    """Pass a message on to a worker."""

    worker: str
    message: Hold | Leave | SaveState


class Kill(_ToAgent, tag="kill"):
    """End a worker's process; ``reason`` for the next leader."""

    worker: str
    reason: str = "it was killed"


class Collected(_ToAgent, tag="collected"):
    """Shards up to this step are not needed any more; None: no shard is."""

    step: int | None


class Shutdown(_ToAgent, tag="shutdown"):
    """End the workers, with SIGKILL after ``grace_s``, and then the agent."""

    grace_s: float


LeaderToAgent = (
    LeaderHello
    | LeaderBeat
    | StartWorker
    | AnnounceGeneration
    | PutEntry
    | CallOff
    | Tell
    | Kill
    | Collected
    | Shutdown
)


# ---- agent → leader


class _FromAgent(_Plain, tag_field="ev", kw_only=True):
    seq: int = 0
    """Counts the messages that are kept until the leader has acted upon them; 0: it is not kept."""


class AgentHello(_FromAgent, tag="hello"):
    """The agent is there.

    Attributes:
        protocol, version, python: see :class:`Greeting`.
        spool: folder in which workers leave shards of checkpoints.
        spooled: descriptions of those that an earlier leader did not fetch.
        executable, pid, hostname: of the agent.
        interface: the one that the ring will use; None: it is left to Gloo.
        interfaces: name → address of all.
        cpus: cores that it may use.
        machine: the same for hosts that are parts of one machine.
        swept: processes of the run that a killed agent had left, and that were ended.
        held: what it holds of the run under an earlier leader; None: it is a new one.
    """

    protocol: int
    version: str
    python: str
    spool: str
    spooled: list[dict[str, Any]]
    executable: str
    pid: int
    hostname: str
    interface: str | None
    interfaces: dict[str, str]
    cpus: int
    machine: str
    swept: int
    held: HeldRun | None


class Greeting(msgspec.Struct):
    """What the hello of an agent of any version says; ``ev`` tells it from other messages."""

    ev: str
    protocol: Any = None
    version: Any = None
    python: Any = None


class Refused(_FromAgent, tag="refused"):
    """Another leader leads this agent, and is heard of."""

    led: LeaderIdentity


class TakenOver(_FromAgent, tag="taken_over"):
    """The agent follows another leader from now on."""

    led: LeaderIdentity


class AgentBeat(_FromAgent, tag="beat"):
    """The agent lives, and its workers' last heartbeats."""

    workers: dict[str, Activity]


class EntryAdded(_FromAgent, tag="store"):
    """A worker has added a value to the rendezvous store."""

    entry: StoreEntry


class Notice(_FromAgent, tag="notice"):
    """The host will go."""

    cause: str
    leave_in_s: float


class AgentWarning(_FromAgent, tag="warning"):
    """Something is wrong on the host."""

    message: str


class WorkerSaid(_FromAgent, tag="worker"):
    """A worker told the leader something."""

    worker: str
    message: _Report


class PastReading(_FromAgent, tag="past"):
    """What was read, and no earlier leader has recorded."""

    message: Reading


class Log(_FromAgent, tag="log"):
    """A worker has printed something."""

    worker: str
    data: str


class WorkerEnded(_FromAgent, tag="worker_exited"):
    """A worker's process ended, with an exit status or by a signal."""

    worker: str
    code: int | None
    signal: int | None


class WorkerNotStarted(_FromAgent, tag="worker_not_started"):
    """The command of the workers cannot be started."""

    worker: str
    error: str


AgentToLeader = (
    AgentHello
    | Refused
    | TakenOver
    | AgentBeat
    | EntryAdded
    | Notice
    | AgentWarning
    | WorkerSaid
    | PastReading
    | Log
    | WorkerEnded
    | WorkerNotStarted
)
