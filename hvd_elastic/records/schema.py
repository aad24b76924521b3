"""Define the type of each event in ``events.jsonl`` and generate their JSON schema.

Events are written as plain fields. The types are the public interface for readers, and the tests
check the events of all their runs with :func:`check_event`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, Union

import msgspec
from msgspec import UNSET, UnsetType

from hvd_elastic.control.endings import Departure
from hvd_elastic.wire import messages as msg

HostSlots = tuple[str, int]
"""Name and number of slots of a host."""


class _Event(msgspec.Struct, tag_field="kind", kw_only=True):
    t: float
    """Unix seconds."""
    mono: float
    """Seconds of a monotonic clock of the leader's machine."""


class _WorkerEvent(_Event):
    host: str
    local_rank: int


class RunStarted(_Event, tag="run_started"):
    """A leader has started or resumed the run."""

    run_id: str
    hosts: list[HostSlots]
    min_np: int
    max_np: int | None
    np: int | None
    pinned: list[str]
    command: list[str]
    resumed: bool
    plain: bool | UnsetType = UNSET


class TakenOver(_Event, tag="taken_over"):
    """Another leader has taken over workers that continued without a leader.

    Attributes:
        processes: host and local rank of each of them.
    """

    generation: int
    size: int
    workers: int
    processes: list[tuple[str, int]] | UnsetType = UNSET


class LeaderCutOff(_Event, tag="leader_cut_off"):
    """The leader has lost all hosts at the same time: most likely its own network has failed.

    Attributes:
        tries_s: how long it tries to reach them before it leads again.
    """

    silent_s: float
    grace_s: float
    tries_s: float | UnsetType = UNSET


class HostsChanged(_Event, tag="hosts_changed"):
    """The hosts of the hostfile, at the start and after each change of the file."""

    hosts: list[HostSlots]
    prices: dict[str, float] | UnsetType = UNSET


class HostSample(_Event, tag="host_sample"):
    """How busy a host is, over the time since the sample before; rates in bytes/s."""

    host: str
    cpu: float
    memory: float
    memory_bytes: int
    sent: int
    received: int
    read: int
    written: int
    gpus: list[msg.GpuSample]
    step_s: float | None
    rank_wait: float | None


class AgentStarted(_Event, tag="agent_started"):
    """The agent of a host has started."""

    host: str
    seconds: float
    python: str
    hostname: str
    interface: str | None
    cpus: int
    machine: str


class HostLost(_Event, tag="host_lost"):
    """The agent of a host is lost; ``silent_s`` is null if its connection was closed."""

    host: str
    cause: str
    silent_s: float | None


class HostDraining(_Event, tag="host_draining"):
    """The run begins to drain a host; ``leave_in_s`` is null if the time is not known."""

    host: str
    cause: str
    leave_in_s: float | None
    asked: bool


class HostDrained(_Event, tag="host_drained"):
    """No process of the run is left on a drained host."""

    host: str


class HostReturned(_Event, tag="host_returned"):
    """A drained host may be used again, by request of the user."""

    host: str


class Waiting(_Event, tag="waiting"):
    """Training waits for workers."""

    reason: str
    have: int
    need: int


class WorkerStarted(_WorkerEvent, tag="worker_started"):
    """A worker process is started; ``worker_left`` tells its end."""


class WorkerStandby(_WorkerEvent, tag="worker_standby"):
    """A standby worker is warm."""

    warm_s: float


class WorkerJoined(_WorkerEvent, tag="worker_joined"):
    """A worker has joined a generation for the first time."""

    rank: int


class WorkerLeft(_WorkerEvent, tag="worker_left"):
    """A worker has ended; ``how`` is the category of ``cause``."""

    cause: str
    how: Departure


class RescaleStarted(_Event, tag="rescale_started"):
    """A generation was announced."""

    generation: int
    from_size: int
    to_size: int
    hosts: list[str]
    slots: list[int]
    reason: str


class Metrics(_Event, tag="metrics"):
    """Progress and throughput; metrics that the script reports are added under their own names."""

    step: int
    epoch: int
    position: int
    examples: int
    size: int
    throughput: float | UnsetType = UNSET
    lr: float | UnsetType | None = UNSET
    global_batch_size: int | UnsetType = UNSET
    noise_scale: float | UnsetType = UNSET
    efficiency: float | UnsetType = UNSET
    goodput: float | UnsetType = UNSET
    skipped_steps: int | UnsetType = UNSET
    rank_s: list[float | None] | UnsetType = UNSET
    passes: int | UnsetType = UNSET
    data_wait: float | UnsetType = UNSET
    late_s: float | UnsetType = UNSET
    rank_wait: float | UnsetType = UNSET
    done: float | UnsetType = UNSET
    shares: list[int] | UnsetType = UNSET


class Input(_Event, tag="input"):
    """How long ranks wait for their data, and what would end it; recorded when that changes."""

    share: float
    shares: list[float]
    bound: Literal["nothing", "cores", "storage", "link", "unknown"]
    more_cores: float | None
    core_s: float | None
    helpers: int
    reason: str


class InputHostJoined(_Event, tag="input_host_joined"):
    """A host reads for the ranks from now on."""

    host: str
    processes: int


class InputHostLeft(_Event, tag="input_host_left"):
    """A host reads for the ranks no more."""

    host: str
    cause: str


class Decision(_Event, tag="decision"):
    """A decision of the policy."""

    action: Literal["grow", "shrink", "move", "stay", "pause", "resume"]
    reason: str
    target: list[HostSlots] | UnsetType = UNSET
    snapshot: dict[str, Any] | UnsetType = UNSET
    np: int | UnsetType = UNSET


class PredictionMissed(_Event, tag="prediction_missed"):
    """A change by the policy brought less goodput than predicted [useful examples/s]."""

    predicted: float
    measured: float
    reason: str


class Checkpoint(_Event, tag="checkpoint"):
    """A checkpoint is complete; without a leader ``shard`` describes its only shard.

    ``not_finite`` names a weight in it that holds NaN or infinity, if there is one.
    """

    step: int
    path: str
    bytes: int
    seconds: float
    blocked_s: float
    shards: int | UnsetType = UNSET
    not_finite: str = ""
    shard: dict[str, Any] | UnsetType = UNSET


class Saved(_Event, tag="saved"):
    """A file that the script saved is in the run folder."""

    name: str
    path: str
    bytes: int
    sha256: str
    seconds: float
    step: int
    epoch: int
    host: str


class Restored(_Event, tag="restored"):
    """Training continues from a checkpoint."""

    step: int
    epoch: int
    position: int
    examples: int
    path: str


class ScriptFailed(_WorkerEvent, tag="script_failed"):
    """The script has raised an exception; without a traceback, the end of its log."""

    traceback: str


class WorkerCrashed(_WorkerEvent, tag="worker_crashed"):
    """A signal has ended a worker; ``traceback`` is the Python stack in its log."""

    cause: str
    traceback: str


class StopRequested(_Event, tag="stop_requested"):
    """The run was asked to stop, by Ctrl-C, a signal, or ``hvd-elastic stop``."""

    reason: str


class CommandDone(_Event, tag="command_done"):
    """The answer to a request; further fields are those of the request."""

    id: str
    op: str
    ok: bool
    message: str


class LogNote(_Event, tag="log_note"):
    """Information for the log."""

    message: str


class TrainingGoesOn(_Event, tag="training_goes_on"):
    """Training does not end as ``training_stopped`` said: the step was undone after a failure."""

    step: int


class Warned(_Event, tag="warning"):
    """A problem that does not stop the run.

    ``unusable_host``: no agent can be started there; ``fatal``: another try is useless.
    """

    message: str
    unusable_host: str | UnsetType = UNSET
    fatal: bool | UnsetType = UNSET


class RunFinished(_Event, tag="run_finished"):
    """The run has ended."""

    status: Literal["succeeded", "failed", "stopped"]
    message: str
    run_id: str
    steps: int
    examples: int
    epochs: int
    exact: bool
    checkpoint_step: int | None
    led_elsewhere: bool
    resume: str | UnsetType = UNSET


def _reported(message: type[msg.WorkerReport]) -> type[msgspec.Struct]:
    """Return the type of an event that is a worker's message, with the same fields."""
    return msgspec.defstruct(
        message.__name__,
        [(field.name, field.type) for field in msgspec.structs.fields(message)],
        bases=(_Event,),
        namespace={"__doc__": message.__doc__},
        tag=message.__struct_config__.tag,
        kw_only=True,
    )


_ALL = (
    RunStarted,
    TakenOver,
    LeaderCutOff,
    HostsChanged,
    HostSample,
    AgentStarted,
    HostLost,
    HostDraining,
    HostDrained,
    HostReturned,
    Waiting,
    WorkerStarted,
    WorkerStandby,
    WorkerJoined,
    WorkerLeft,
    RescaleStarted,
    _reported(msg.RescaleFinished),
    _reported(msg.TrainingStopped),
    TrainingGoesOn,
    Metrics,
    _reported(msg.BatchPlan),
    _reported(msg.Shares),
    _reported(msg.ExampleSkipped),
    Input,
    InputHostJoined,
    InputHostLeft,
    Decision,
    PredictionMissed,
    Checkpoint,
    Saved,
    Restored,
    ScriptFailed,
    WorkerCrashed,
    StopRequested,
    CommandDone,
    LogNote,
    Warned,
    RunFinished,
)
Event: Any = Union[_ALL]  # noqa: UP007  (made from a tuple)
"""Any event."""

_OPEN_KINDS = {"metrics", "command_done"}
"""Kinds with further fields: metrics of the script, and fields of the request."""
_TYPES = {each.__struct_config__.tag: each for each in _ALL}


def check_event(record: Mapping[str, Any]) -> None:
    """Check one record of ``events.jsonl`` against its type.

    Raises:
        ValueError: the kind is unknown, or a field is missing, unknown or of another type; names
            it.

    >>> check_event({"t": 1.0, "mono": 2.0, "kind": "host_drained", "host": "node1"})
    """
    msgspec.convert(record, Event)
    kind = record["kind"]
    unknown = record.keys() - {*_TYPES[kind].__struct_fields__, "kind"}
    if unknown and kind not in _OPEN_KINDS:
        raise ValueError(f"event {kind} has fields that are not documented: {sorted(unknown)}")


def event_schema() -> dict[str, Any]:
    """Return the JSON schema of a line of ``events.jsonl``."""
    schema = msgspec.json.schema(Event)
    for kind in schema["$defs"].values():  # Python 3.13 keeps docstrings without their indentation
        if "description" in kind:
            kind["description"] = inspect.cleandoc(kind["description"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of events.jsonl",
        "anyOf": schema["anyOf"],
        "$defs": schema["$defs"],
    }
