"""Define the type of each event of a run, a line of ``events.jsonl``.

What has happened is built as its type, written and read by :mod:`hvd_elastic.records.events`, and
told apart by ``match``. Workers report some of it as it is, in place of a message. Written as plain
fields, it is the public interface for readers; the tests compare the events of all their runs with
these types.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

Status = Literal["succeeded", "failed", "stopped"]
"""How a run ends."""
Action = Literal["grow", "shrink", "move", "stay", "pause", "resume"]
"""What a policy decides."""
Bound = Literal["nothing", "cores", "storage", "link", "unknown"]
"""What ranks that wait for data wait for."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A whole number that a float can hold; no run has as many examples."""


class HostSlots(NamedTuple):
    """A host, and the number of workers that it may hold; written as a list of both."""

    name: str
    slots: int


class Departure(enum.Enum):
    """How a worker process ended, as reported by the event ``worker_left``.

    LEFT: it left on request. FINISHED: its training function returned. HOST_LOST: its host was
    lost. KILLED: the run killed it. DIED: anything else, such as a crash or a kill from outside.
    """

    LEFT = "left"
    FINISHED = "finished"
    HOST_LOST = "host_lost"
    KILLED = "killed"
    DIED = "died"

    @property
    def in_order(self) -> bool:
        """Return whether the end was orderly, so that no other worker is affected."""
        return self in (Departure.LEFT, Departure.FINISHED)


class RunEvent(msgspec.Struct, tag_field="kind", kw_only=True, omit_defaults=True, gc=False):
    """What has happened in a run; its time is set when it is written."""

    t: float = 0.0
    """Unix seconds."""
    mono: float = 0.0
    """Seconds of a monotonic clock of the leader's machine."""

    @property
    def kind(self) -> str:
        """Name of the kind of event."""
        return str(self.__struct_config__.tag)


class _OfWorker(RunEvent):
    host: str
    local_rank: int  # index of its slot, as in the names of logs


class RunStarted(RunEvent, tag="run_started"):
    """A leader has started or resumed the run."""

    run_id: str
    hosts: list[HostSlots]
    min_np: int
    max_np: int | None
    np: int | None
    pinned: list[str]
    command: list[str]
    resumed: bool
    plain: bool = False


class TakenOver(RunEvent, tag="taken_over"):
    """Another leader has taken over workers that continued without a leader.

    Attributes:
        processes: host and local rank of each of them.
    """

    generation: int
    size: int
    workers: int
    processes: list[tuple[str, int]] = []


class LeaderCutOff(RunEvent, tag="leader_cut_off"):
    """The leader has lost all hosts at the same time: most likely its own network has failed.

    Attributes:
        tries_s: how long it tries to reach them before it leads again.
    """

    silent_s: float
    grace_s: float
    tries_s: float


class HostsChanged(RunEvent, tag="hosts_changed"):
    """The hosts of the hostfile, at the start and after each change of the file."""

    hosts: list[HostSlots]
    prices: dict[str, float] = {}


class GpuSample(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Use of a GPU.

    Attributes:
        busy: part of the time in which it computed.
        memory: part of its memory in use.
        memory_bytes: its memory.
    """

    busy: float
    memory: float
    memory_bytes: int


class HostSample(RunEvent, tag="host_sample"):
    """How busy a host is, over the time since the sample before; rates in bytes/s."""

    host: str
    cpu: float
    memory: float
    memory_bytes: int
    sent: int
    received: int
    read: int
    written: int
    gpus: list[GpuSample]
    step_s: float | None
    rank_wait: float | None


class Fault(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """A fault of the hardware of a host.

    Attributes:
        what: what is faulty and how, in the same words for as long as it is.
        text: the same with its figures and what to do about it.
        number: how often it was seen.
        is_broken: whether training cannot rely on the host any more; else it is likely to break.
    """

    what: str
    text: str
    number: int = 1
    is_broken: bool = False

    @property
    def is_gpu(self) -> bool:
        """Whether it is one of a GPU."""
        return self.what.startswith("GPU ")


class HostFaults(RunEvent, tag="host_faults"):
    """The faults of the hardware of a host as they are known now, when that has changed."""

    host: str
    faults: list[Fault]


class AgentStarted(RunEvent, tag="agent_started"):
    """The agent of a host has started."""

    host: str
    seconds: float
    python: str
    hostname: str
    interface: str | None
    cpus: Annotated[int, Meta(ge=1)]
    machine: str


class HostLost(RunEvent, tag="host_lost"):
    """The agent of a host is lost; ``silent_s`` is null if its connection was closed."""

    host: str
    cause: str
    silent_s: float | None


class HostDraining(RunEvent, tag="host_draining"):
    """The run begins to drain a host; ``leave_in_s`` is null if the time is not known."""

    host: str
    cause: str
    leave_in_s: float | None
    asked: bool


class HostDrained(RunEvent, tag="host_drained"):
    """No process of the run is left on a drained host."""

    host: str


class HostReturned(RunEvent, tag="host_returned"):
    """A drained host may be used again, by request of the user."""

    host: str


class Waiting(RunEvent, tag="waiting"):
    """Training waits for workers."""

    reason: str
    have: int
    need: int


class WorkerStarted(_OfWorker, tag="worker_started"):
    """A worker process is started; ``worker_left`` tells its end."""


class WorkerStandby(_OfWorker, tag="worker_standby"):
    """A standby worker is warm."""

    warm_s: float


class WorkerJoined(_OfWorker, tag="worker_joined"):
    """A worker has joined a generation for the first time."""

    rank: int


class WorkerLeft(_OfWorker, tag="worker_left"):
    """A worker has ended; ``how`` is the category of ``cause``."""

    cause: str
    how: Departure


class RescaleStarted(RunEvent, tag="rescale_started"):
    """A generation was announced; ``slots`` are the ranks on each of ``hosts``, in rank order."""

    generation: int
    from_size: int
    to_size: int
    hosts: list[str]
    slots: list[Count]
    reason: str


class RescaleFinished(RunEvent, tag="rescale_finished"):
    """The root has taken the first step of a generation."""

    generation: int
    size: int
    pause_s: float | None


class TrainingStopped(RunEvent, tag="training_stopped"):
    """The ranks have agreed to end training after ``step``, as ``rank`` has asked (``stop()``)."""

    step: int
    rank: int
    reason: str


class TrainingGoesOn(RunEvent, tag="training_goes_on"):
    """Training does not end as ``training_stopped`` said: the step was undone after a failure."""

    step: int


class OpenEvent(RunEvent, kw_only=True):
    """An event whose line has further fields under their own names, in memory in ``values``."""

    values: dict[str, Any] = {}


class Metrics(OpenEvent, tag="metrics"):
    """Progress and throughput; metrics that the script reports are added under their own names.

    One that has the name of a field is added as ``script.NAME``. What is null or missing is not
    known, except that of ``lr``, null is a rate that is not a number.

    Attributes:
        reported: names of the metrics that the script has reported since the event before; the
            others are as they were.
        late_s: how long it was on its way, such as after a takeover, if that is long [s].
    """

    step: Count
    epoch: Count
    position: Count
    examples: Count
    size: Count
    throughput: float | None = None
    rank_wait: float | None = None
    data_wait: float | None = None
    lr: float | UnsetType | None = UNSET
    global_batch_size: Count | None = None
    shares: list[int] | None = None
    rank_s: list[float | None] | None = None
    passes: int | None = None
    noise_scale: float | None = None
    efficiency: float | None = None
    done: float | None = None
    skipped_steps: int | None = None
    goodput: float | None = None
    reported: list[str] | None = None
    late_s: float = 0.0


class BatchLimits(msgspec.Struct):
    """Limits of an adaptive batch; see :class:`hvd_elastic.model.goodput.BatchLimits`."""

    initial_batch_size: Annotated[int, Meta(ge=1)]
    max_batch_size: Annotated[int, Meta(ge=1)]
    min_atomic_batch_size: Count
    max_atomic_batch_size: Annotated[int, Meta(ge=1)] | None
    max_accumulation_steps: Count


class BatchPlan(RunEvent, tag="batch_plan"):
    """The batch plan at the start, or a change of it."""

    step: int
    global_batch_size: Annotated[int, Meta(ge=1)]
    atomic_batch_size: int
    accumulation_steps: Count
    lr_scale: float | None
    limits: BatchLimits
    reason: str


class Shares(RunEvent, tag="shares"):
    """Number of examples of each rank in a full step; empty: equal shares."""

    step: int
    global_batch_size: int
    shares: list[int]
    reason: str


class ExampleSkipped(RunEvent, tag="example_skipped"):
    """An example of the dataset cannot be decoded and is left out; once for each worker."""

    example: str
    reason: str


class Input(RunEvent, tag="input"):
    """How long ranks wait for their data, and what would end it; recorded when that changes.

    Attributes:
        share: part of the time that the rank waits which waits most, in [0, 1].
        more_cores: further cores that would end the wait; null: not known, or no remedy.
        core_s: processor time to read an example [s]; null: not known.
        helpers: number of processes of input hosts that read for the ranks.
    """

    share: float
    shares: list[float]
    bound: Bound
    more_cores: float | None
    core_s: float | None
    helpers: int
    reason: str


class InputHostJoined(RunEvent, tag="input_host_joined"):
    """A host reads for the ranks from now on."""

    host: str
    processes: int


class InputHostLeft(RunEvent, tag="input_host_left"):
    """A host reads for the ranks no more."""

    host: str
    cause: str


class Decision(RunEvent, tag="decision"):
    """A decision of the policy; ``np``: it changes the number of slots."""

    action: Action
    reason: str
    target: list[HostSlots] | None = None
    snapshot: dict[str, Any] | None = None
    np: int | None = None


class PredictionMissed(RunEvent, tag="prediction_missed"):
    """A change by the policy brought less goodput than predicted [useful examples/s]."""

    predicted: float
    measured: float
    reason: str


class Checkpoint(RunEvent, tag="checkpoint"):
    """A checkpoint is complete; without a leader ``shard`` describes its only shard.

    ``not_finite`` names a weight in it that holds NaN or infinity, if there is one.
    """

    step: Count
    path: str
    bytes: Count
    seconds: float
    blocked_s: float
    shards: int | None = None
    not_finite: str = ""
    shard: dict[str, Any] | None = None


class Saved(RunEvent, tag="saved"):
    """A file that the script saved is in the run folder."""

    name: str
    path: str
    bytes: int
    sha256: str
    seconds: float
    step: int
    epoch: int
    host: str


class Restored(RunEvent, tag="restored"):
    """Training continues from a checkpoint."""

    step: int
    epoch: int
    position: int
    examples: int
    path: str


class ScriptFailed(_OfWorker, tag="script_failed"):
    """The script has raised an exception; without a traceback, the end of its log."""

    traceback: str


class WorkerCrashed(_OfWorker, tag="worker_crashed"):
    """A signal has ended a worker; ``traceback`` is the Python stack in its log."""

    cause: str
    traceback: str


class StopRequested(RunEvent, tag="stop_requested"):
    """The run was asked to stop, by Ctrl-C, a signal, or ``hvd-elastic stop``."""

    reason: str


class CommandDone(OpenEvent, tag="command_done"):
    """The answer to a request; further fields are those of the request."""

    id: str
    op: str
    ok: bool
    message: str


class LogNote(RunEvent, tag="log_note"):
    """Information for the log."""

    message: str


class Warned(RunEvent, tag="warning"):
    """A problem that does not stop the run.

    ``unusable_host``: no agent can be started there; ``fatal``: another try is useless.
    ``host_at_risk``: the cloud may take this host away soon.
    """

    message: str
    unusable_host: str = ""
    fatal: bool = False
    host_at_risk: str = ""


class RunFinished(RunEvent, tag="run_finished"):
    """The run has ended."""

    status: Status
    message: str
    run_id: str
    steps: int
    examples: int
    epochs: int
    exact: bool
    checkpoint_step: int | None
    led_elsewhere: bool
    resume: str = ""


Event = (
    RunStarted
    | TakenOver
    | LeaderCutOff
    | HostsChanged
    | HostSample
    | HostFaults
    | AgentStarted
    | HostLost
    | HostDraining
    | HostDrained
    | HostReturned
    | Waiting
    | WorkerStarted
    | WorkerStandby
    | WorkerJoined
    | WorkerLeft
    | RescaleStarted
    | RescaleFinished
    | TrainingStopped
    | TrainingGoesOn
    | Metrics
    | BatchPlan
    | Shares
    | ExampleSkipped
    | Input
    | InputHostJoined
    | InputHostLeft
    | Decision
    | PredictionMissed
    | Checkpoint
    | Saved
    | Restored
    | ScriptFailed
    | WorkerCrashed
    | StopRequested
    | CommandDone
    | LogNote
    | Warned
    | RunFinished
)
"""Any event of a run."""


class Output(RunEvent, tag="output"):
    """A line that rank 0 has printed; it is kept in ``output.jsonl``."""

    host: str
    local_rank: int
    line: str


class Unread(RunEvent):
    """In place of an event that this version cannot read.

    Attributes:
        what: its kind.
        known: whether the kind is known, so that its fields are not those of the kind.
        fields: all its fields.
    """

    what: str
    known: bool
    fields: dict[str, Any]


ReadEvent = Event | Unread
"""What a line of ``events.jsonl`` is read as."""
