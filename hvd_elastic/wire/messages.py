"""Define the messages between leader, agents and workers: one type each, one union per direction.

A message is decoded into the type that it was encoded from, which checks it; see
:mod:`hvd_elastic.wire.framing`. The leader checks in the hello of an agent that both have the same
version, so there are no optional fields for older peers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from hvd_elastic.control.commands import Announce, Member
from hvd_elastic.control.events import FoundWorker, WorkerExited
from hvd_elastic.control.progress import Activity, Position
from hvd_elastic.run_events import (
    BatchPlan,
    Checkpoint,
    ExampleSkipped,
    Fault,
    HostSample,
    Metrics,
    RescaleFinished,
    Restored,
    Saved,
    Shares,
    TrainingStopped,
    Warned,
)
from hvd_elastic.wire.framing import MessageDecoder, compress, decompress, encode

PROTOCOL = 13
"""Version of the protocol, increased with every incompatible change."""


class _Plain(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Part of a message."""


NOT_FINITE_CHOICES = ("skip", "stop", "ignore")
"""What can be done about a step whose gradients are not finite; the first is the default."""


class WorkerOptions(_Plain):
    """The leader's options for all workers, passed in their environment.

    Attributes:
        heartbeat_s: time between heartbeats [s].
        audit: whether to record which examples were really read.
        checkpoint_every_s: time between checkpoints [s]; 0: no checkpoints.
        input_hosts: whether input hosts read for the ranks.
        on_not_finite: what is done about a step whose gradients are not finite, of
            ``NOT_FINITE_CHOICES``.
        profile: rank whose steps are profiled; -1: none.
    """

    heartbeat_s: float = 1.0
    audit: bool = False
    checkpoint_every_s: float = 0.0
    input_hosts: bool = False
    on_not_finite: str = NOT_FINITE_CHOICES[0]
    profile: int = -1


SAVED_NAME = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z"
"""Pattern of the name of a file that a script saves: no path, and no hidden file."""


class SavedFile(_Plain):
    """Description of a file that the script has saved.

    Attributes:
        name: name that the script gave it.
        bytes, sha256: size and SHA-256.
        step, epoch: progress of training when it was saved.
        host: host of the worker that saved it.
        generation, life: generation in which it was saved, and term of the leader that formed it.
        number: orders the files that were saved in one generation.
        created: when it was saved, by the clock of the host [Unix seconds].
    """

    name: Annotated[str, msgspec.Meta(pattern=SAVED_NAME)]
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    step: int
    epoch: int
    host: str
    generation: int
    life: str
    number: int
    created: float

    @property
    def spooled(self) -> str:
        """Name of the file in the spool of its host."""
        return f"{self.name}-{self.number}-{self.sha256[:12]}.save"

    def event(self, path: str, seconds: float) -> Saved:
        """Return the event of the run.

        Args:
            path: path of the file in the run folder.
            seconds: time from the call of ``save`` until it was there [s].
        """
        name, size, sha256 = self.name, self.bytes, self.sha256
        took_s = round(seconds, 3)
        return Saved(name, path, size, sha256, took_s, self.step, self.epoch, self.host)


class StoreEntry(_Plain):
    """An entry of the rendezvous store of a generation; ``value`` is compressed."""

    generation: int
    scope: str
    key: str
    value: bytes


class LeaderIdentity(_Plain):
    """Identity of the leader of a run.

    Attributes:
        leader: unique id of the leader.
        led_by: name of the leader for messages to users.
        led_since: time when it began to lead [Unix seconds of its own clock].
        heard_s: time since an agent last heard of it [s].
    """

    run_id: str
    leader: str
    led_by: str
    led_since: float
    heard_s: float = 0.0


class HeldRun(_Plain):
    """The workers of a run that an agent holds, as known to the agent's last leader.

    Attributes:
        generation, members: the generation that was announced last.
        untold: number of messages that follow at once, which that leader may not have acted upon.
    """

    generation: int
    members: tuple[Member, ...]
    workers: tuple[FoundWorker, ...]
    untold: int = 0


class Announcement(_Plain):
    """A generation, as announced to its hosts and workers.

    Attributes:
        order: number, members and reason; its ``root`` is the member whose state all others get,
            which may be live or from a checkpoint.
        life: term of the leader, which distinguishes generations of different leaders.
        restore: path of the manifest on the root's host that the root loads first; None: the root
            has the state.
        checkpoint: path of the manifest that ``restore`` is a copy of, for messages.
    """

    order: Announce
    life: str
    restore: str | None = None
    checkpoint: str | None = None

    @property
    def generation(self) -> int:
        """Number of the generation."""
        return self.order.generation

    @property
    def root_rank(self) -> int:
        """Rank whose state all others get; 0 if no member has a state."""
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
    """Heartbeat of a worker; ``outlived`` is the number of a SIGTERM or SIGHUP that it ignored."""

    activity: Activity = Activity()
    outlived: int = 0


class CheckpointAnswered(_FromWorker, tag="checkpoint_answered"):
    """The worker has written the requested checkpoint or has failed to."""


class Imported(_FromWorker, tag="imported"):
    """Names of the installed modules that the worker imported before training, in order."""

    modules: list[str]


# ---- worker → leader, through the agent


class Ready(_FromWorker, tag="ready"):
    """A standby worker is warm; ``code``: digests of the script and what lies beside it."""

    warm_s: float
    code: dict[str, str] = {}


class Standing(_FromWorker, kw_only=True):
    """State of a member of a generation.

    Attributes:
        step: number of optimizer steps of its live state; -1: its state is not consistent.
        state: orders the states of one step; a larger number is newer.
    """

    generation: int
    step: int
    state: int = 0


class Joined(Standing, tag="joined"):
    """A member has its communicator and the state; ``stopped``: in which training ends early."""

    stopped: bool = False


class Held(Standing, tag="held"):
    """A member has stopped at a step boundary, as requested."""


class Broken(Standing, tag="broken"):
    """The collectives or the rendezvous of a member have failed."""

    error: str
    progress: Position | None = None


class Finished(_FromWorker, tag="finished"):
    """The training function has returned."""

    progress: Position


class ScriptRaised(_FromWorker, tag="script_error"):
    """The script has raised an exception; the process is about to end."""

    traceback: str
    progress: Position


class _Reading(_FromWorker):
    def as_record(self) -> tuple[str, dict[str, Any]]:
        """Return the kind of its record in the audit, and the fields."""
        fields = msgspec.to_builtins(self)
        return fields.pop("kind"), fields


class Dataset(_Reading, tag="dataset"):
    """Number of examples of the dataset and of those that ``drop_last`` drops, for the audit."""

    n: int
    dropped: int


class Used(_Reading, tag="used"):
    """Indices that all ranks really read for one step, for the audit.

    ``later`` holds those of the following epochs, one list each: a step of several batches may
    reach into the next epochs. Those of ``skipped`` are among them: examples that cannot be
    decoded.
    """

    generation: int
    step: int
    epoch: int
    position: int
    indices: list[int]
    padding: list[int]
    later: list[list[int]] = []
    skipped: list[int] = []


Reading = Dataset | Used
"""Messages that the audit records."""


class CheckpointWritten(_FromWorker, tag="checkpoint"):
    """A worker has written its shard; ``shard`` is the content of its description on disk."""

    shard: dict[str, Any]
    step: int
    epoch: int
    examples: int
    path: str
    bytes: int
    seconds: float
    blocked_s: float

    def event(self) -> Checkpoint:
        """Return the event of a run without a leader, whose only shard this is."""
        return Checkpoint(
            step=self.step,
            path=self.path,
            bytes=self.bytes,
            seconds=self.seconds,
            blocked_s=self.blocked_s,
            not_finite=str(self.shard.get("not_finite") or ""),
            shard=self.shard,
        )


class FileSaved(_FromWorker, tag="saved"):
    """The script has saved a file, which is in the host's spool; without a leader, at ``path``."""

    file: SavedFile
    path: str
    seconds: float

    def event(self) -> Saved:
        return self.file.event(self.path, self.seconds)


class SavedWanted(_FromWorker, tag="saved_wanted"):
    """The worker is to load a file that the script has saved; answered by :class:`SavedBrought`."""

    name: str


class InputServing(_FromWorker, tag="input_serving"):
    """A worker of an input host reads for the ranks, in one process for each port."""

    ports: list[int]


class CheckpointFailed(_FromWorker, tag="checkpoint_failed"):
    """A worker could not write its shard."""

    message: str


Report = (
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
    | TrainingStopped
    | Warned
    | ExampleSkipped
    | Restored
    | Dataset
    | Used
    | CheckpointWritten
    | CheckpointFailed
    | InputServing
    | FileSaved
    | SavedWanted
)
"""What a worker tells the leader, events of the run among it; ``t`` of an event: when it was sent.
"""
WorkerToAgent = WorkerHello | WorkerBeat | CheckpointAnswered | Imported | Report


# ---- agent → worker


class _ToWorker(_Plain, tag_field="kind"):
    pass


class Join(_ToWorker, tag="join"):
    """Join a generation; ``env`` holds Horovod's variables for this worker."""

    announcement: Announcement
    env: dict[str, str]


class Hold(_ToWorker, tag="hold"):
    """Stop at the next step boundary, keep the state and wait."""


class Leave(_ToWorker, tag="leave"):
    """Leave the run at the next step boundary."""


class Abort(_ToWorker, tag="abort"):
    """A generation is aborted: make its collectives fail."""

    generation: int


class SaveState(_ToWorker, tag="checkpoint"):
    """Write a checkpoint."""


class Recorded(_ToWorker, tag="recorded"):
    """The leader has recorded the examples read up to this step."""

    step: int


class ServeInput(_ToWorker, tag="serve_input"):
    """Read for the ranks: in so many processes, listening on ``address``.

    ``certificate`` is the private key and certificate of the run, which both sides show.
    """

    processes: int
    address: str
    certificate: str


class InputServer(_Plain):
    """The processes of an input host that read."""

    host: str
    address: str
    ports: list[int]


class UseInput(_ToWorker, tag="use_input"):
    """The processes of input hosts that read for the ranks now; replaces an earlier list."""

    certificate: str
    servers: list[InputServer]


class SavedBrought(_ToWorker, tag="saved_brought"):
    """A file of the script is on this host, at ``path``, for this worker to load and remove.

    ``path`` is empty if the run has no such file, or if it could not be brought: see ``error``.
    """

    name: str
    path: str = ""
    error: str = ""


class End(_ToWorker, tag="end"):
    """End now if a SIGTERM was ignored."""


Instruction = Join | Hold | Leave
"""Messages that the training thread waits for; the others take effect at once."""

AgentToWorker = (
    Instruction | Abort | SaveState | Recorded | End | ServeInput | UseInput | SavedBrought
)


# ---- leader → agent


class _ToAgent(_Plain, tag_field="op"):
    pass


class LeaderHello(_ToAgent, tag="hello", forbid_unknown_fields=False):
    """The first message of a leader: the run and its settings for this host.

    Attributes:
        run_id, leader, led_by, led_since: see :class:`LeaderIdentity`.
        host: name of the agent's host in the hostfile.
        take_over: whether to take over workers of an earlier leader instead of ending them.
        failure_timeout_s: time without a sign of life after which the leader counts as lost [s].
        leader_grace_s: time to continue without a leader [s].
        env, cwd, command: environment, working directory and command of the workers.
        run: contents of run.json, for a later leader that has no run folder.
        interface: network interface of the ring; None: the one with this host's own address.
        local_address: address of this host for the other hosts.
        heartbeat_s: time between heartbeats of the agent [s]; those of the leader come less often.
        preemption: cloud whose metadata service tells whether the host will be preempted; None:
            none is asked.
        preemption_command: command that tells the same; None: there is none.
        options: options for the workers.
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
    preemption: str | None
    preemption_command: str | None
    options: WorkerOptions

    @property
    def identity(self) -> LeaderIdentity:
        """Identity of the sender."""
        return LeaderIdentity(
            run_id=self.run_id,
            leader=self.leader,
            led_by=self.led_by,
            led_since=self.led_since,
        )


class LeaderBeat(_ToAgent, tag="beat"):
    """Heartbeat of the leader.

    Attributes:
        acted_upon: number of the last message that the leader has processed.
        recorded: last step whose examples the leader has recorded; None: the run is not audited.
    """

    acted_upon: int
    recorded: int | None = None


class StartWorker(_ToAgent, tag="start_worker"):
    """Start a standby worker; ``slots`` is the number of processes that share the host.

    ``reads``: it reads for the ranks of other hosts and does not train. ``devices``: GPU of each
    slot of the run on the host; empty: those of the host in their order.
    """

    worker: str
    local_rank: int
    slots: int
    reads: bool = False
    devices: list[int] = []


class AnnounceGeneration(_ToAgent, tag="announce"):
    """Announce a generation to the members on this host.

    ``packed`` is the announcement, encoded and compressed: it lists all members, and goes to all
    hosts.
    """

    packed: bytes

    @classmethod
    def of(cls, announcement: Announcement) -> AnnounceGeneration:
        """Return the message that holds an announcement."""
        return cls(compress(encode(announcement)))

    @property
    def announcement(self) -> Announcement:
        """The announcement.

        Raises:
            ProtocolError: the sender did not pack one.
        """
        decoder: MessageDecoder[Announcement] = MessageDecoder(Announcement, "the leader")
        return decoder.decode(decompress(self.packed))


class PutEntry(_ToAgent, tag="store"):
    """Another host has added an entry to the rendezvous store."""

    entry: StoreEntry


class PutAddresses(_ToAgent, tag="addresses"):
    """The ranks of all other hosts have added their addresses to the rendezvous store.

    Attributes:
        generation, scope: where they belong.
        ranks: number of ranks in the generation.
        first, count: first rank of this host, and number of its ranks.
        values: compressed addresses for these ranks of each other rank, in the order of the ranks.
    """

    generation: int
    scope: str
    ranks: int
    first: int
    count: int
    values: bytes


class CallOff(_ToAgent, tag="abort"):
    """A generation is aborted."""

    generation: int


class Tell(_ToAgent, tag="tell"):
    """Forward a message to a worker."""

    worker: str
    message: Hold | Leave | SaveState | ServeInput | UseInput | SavedBrought


class Kill(_ToAgent, tag="kill"):
    """Kill a worker's process; ``reason`` is kept for a later leader."""

    worker: str
    reason: str = "it was killed"


class Release(_ToAgent, tag="release"):
    """Files that the host's spool need not keep, of one kind.

    Attributes:
        kind: shards of checkpoints, or files that the script has saved.
        up_to_step: last step of the shards; None: all of them.
        files: the saved files; None: all of them.
    """

    kind: Literal["shards", "saved"]
    up_to_step: int | None = None
    files: tuple[SavedFile, ...] | None = None


class Shutdown(_ToAgent, tag="shutdown"):
    """End the workers, with SIGKILL after ``grace_s``, and then the agent itself."""

    grace_s: float


LeaderToAgent = (
    LeaderHello
    | LeaderBeat
    | StartWorker
    | AnnounceGeneration
    | PutEntry
    | PutAddresses
    | CallOff
    | Tell
    | Kill
    | Release
    | Shutdown
)


# ---- agent → leader


class _FromAgent(_Plain, tag_field="ev", kw_only=True):
    seq: int = 0
    """Sequence number of a message that is kept until the leader has processed it; 0: not kept."""


class AgentHello(_FromAgent, tag="hello"):
    """The first message of an agent.

    Attributes:
        protocol, version, python: version of the protocol, of this package and of Python.
        spool: folder in which workers leave shards of checkpoints.
        spooled: descriptions of shards that an earlier leader did not fetch.
        saved: files that the script saved and that no leader has fetched.
        executable, pid, hostname: Python executable, process id and host name of the agent.
        interface: network interface that the ring will use; None: Gloo chooses.
        interfaces: address of each network interface by name.
        cpus: number of cores that the agent may use.
        machine: id of the machine, the same for hosts that share its cores; "": they are its own.
        swept: number of processes left by a killed agent of the run that were ended.
        time: clock of the host [Unix s].
        held: workers of the run held under an earlier leader; None: the agent is new.
    """

    protocol: int
    version: str
    python: str
    spool: str
    spooled: list[dict[str, Any]]
    saved: list[SavedFile]
    executable: str
    pid: int
    hostname: str
    interface: str | None
    interfaces: dict[str, str]
    cpus: int
    machine: str
    swept: int
    held: HeldRun | None
    time: float = 0.0


class Greeting(msgspec.Struct):
    """Fields of the hello of an agent of any version; ``ev`` is the kind of the message."""

    ev: str
    protocol: Any = None
    version: Any = None
    python: Any = None


class Refused(_FromAgent, tag="refused"):
    """The agent has another leader that is alive."""

    led: LeaderIdentity


class TakenOver(_FromAgent, tag="taken_over"):
    """Another leader has taken the agent over."""

    led: LeaderIdentity


class AgentBeat(_FromAgent, tag="beat"):
    """Heartbeat of the agent, with the last heartbeats of its workers."""

    workers: dict[str, Activity]


class EntryAdded(_FromAgent, tag="store"):
    """A worker has added an entry to the rendezvous store."""

    entry: StoreEntry


class Notice(_FromAgent, tag="notice"):
    """The host will be preempted."""

    cause: str
    leave_in_s: float


class HostSampled(_FromAgent, tag="host_sample"):
    """How busy the host is."""

    sample: HostSample


class HardwareJudged(_FromAgent, tag="hardware"):
    """The faults of the hardware of the host, when that has changed."""

    faults: list[Fault]


class AgentWarning(_FromAgent, tag="warning"):
    """A problem on the host that does not stop training.

    ``at_risk``: the cloud may take the host away soon, without a notice so far.
    """

    message: str
    at_risk: bool = False


class WorkerSaid(_FromAgent, tag="worker"):
    """A message of a worker to the leader."""

    worker: str
    message: Report


class PastReading(_FromAgent, tag="past"):
    """An audit record that no earlier leader has stored."""

    message: Reading


class Log(_FromAgent, tag="log"):
    """Output of a worker."""

    worker: str
    data: str


class WorkerEnded(_FromAgent, tag="worker_exited"):
    """The process of a worker has ended, with an exit status or by a signal.

    ``out_of_memory``: the kernel has killed it for lack of memory.
    """

    worker: str
    code: int | None
    signal: int | None
    out_of_memory: bool = False

    def event(self) -> WorkerExited:
        return WorkerExited(self.worker, self.code, self.signal, self.out_of_memory)


class WorkerNotStarted(_FromAgent, tag="worker_not_started"):
    """The process of a worker cannot be started."""

    worker: str
    error: str


AgentToLeader = (
    AgentHello
    | Refused
    | TakenOver
    | AgentBeat
    | EntryAdded
    | Notice
    | HostSampled
    | HardwareJudged
    | AgentWarning
    | WorkerSaid
    | PastReading
    | Log
    | WorkerEnded
    | WorkerNotStarted
)
