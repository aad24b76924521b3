"""Train a function or a script on hosts that an engine gives, and return the function's value."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from hvd_elastic.checkpoint.manifests import find_checkpoints
from hvd_elastic.checkpoint.place import UnfinishedNote, check_new_place
from hvd_elastic.checkpoint.url import CheckpointUrl
from hvd_elastic.engines.base import repeating
from hvd_elastic.engines.dial_in.fixed_ranks import FixedRanks
from hvd_elastic.engines.dial_in.hosts import DialInHosts, HostProcess
from hvd_elastic.engines.dial_in.task import COMMAND, OUTCOME_FILE, TASK_FILE, Outcome, Task
from hvd_elastic.errors import ArgumentError, RunError, UsageError
from hvd_elastic.formatting import count
from hvd_elastic.leader.leader import lead
from hvd_elastic.leader.resuming import check_not_complete
from hvd_elastic.leader.spec import RunSpec, check_choices, check_objective, check_patience
from hvd_elastic.policy.objective import Objective
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import summarize
from hvd_elastic.records.tensorboard import check_tensorboard
from hvd_elastic.run_events import (
    Event,
    HostDrained,
    HostDraining,
    HostReturned,
    ScriptFailed,
)
from hvd_elastic.urls import is_url
from hvd_elastic.views.terminal import LastingView

_CALM_S = 10.0
"""Time without a new host after which an elastic run begins with fewer than wanted [s]."""

OPTIONS = (
    *("run_id", "audit", "on_not_finite", "tensorboard", "checkpoint_every_s", "keep_checkpoints"),
    *("checkpoint_folder", "checkpoint_copies", "failure_timeout_s", "spares", "policy"),
    *("objective", "min_speedup_per_slot", "deadline_s", "target_examples"),
)
"""Options of an elastic run, which are those of ``hvd-elastic run``."""
_LEAST = {"checkpoint_every_s": 0, "keep_checkpoints": 1, "checkpoint_copies": 0, "spares": 0}
_ABOVE_0 = ("failure_timeout_s", "min_speedup_per_slot", "deadline_s", "target_examples")
"""Bounds of options, which are those of ``hvd-elastic run`` too."""

_LOOK_S = 1.0
"""Time between two checks whether more hosts are to come [s]."""

Check = Callable[[], None]
"""Raises an error if no more hosts are to come."""
Acquire = Callable[[DialInHosts], AbstractContextManager[Check]]
"""Has the engine give hosts, which dial in, until the context ends."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of processes.

    Attributes:
        wanted: number of processes to begin with.
        least, most: bounds of an elastic run; None: 1, and ``wanted``.
        elastic: whether ranks may come and go.
    """

    wanted: int
    least: int | None = None
    most: int | None = None
    elastic: bool = True

    def __post_init__(self) -> None:
        if not self.elastic and (self.least is not None or self.most is not None):
            raise ArgumentError(
                "with elastic=False the number of processes stays the same: leave its bounds out"
            )
        for name in ("least", "wanted", "most"):
            value = getattr(self, name)
            if value is None and name != "wanted":
                continue
            number = 0
            with contextlib.suppress(TypeError):
                number = operator.index(value)  # NumPy's integers have one too
            if number < 1:
                raise ArgumentError(
                    f"the {name} number of processes is {value!r}; it must be a positive integer"
                )
            object.__setattr__(self, name, number)
        if not (self.least or 1) <= self.wanted <= (self.most or self.wanted):
            raise ArgumentError(
                f"{count(self.wanted, 'process')} wanted, and at least {self.least or 1} and at "
                f"most {self.most or self.wanted}: the first must be between the others"
            )

    @property
    def fewest(self) -> int:
        """Return the smallest number of processes."""
        return (self.least or 1) if self.elastic else self.wanted

    @property
    def limit(self) -> int:
        """Return the largest number of processes."""
        return self.most or self.wanted


def train(
    task: Task,
    sizes: Sizes,
    address: str,
    engine: str,
    acquire: Acquire,
    options: Mapping[str, Any] | None = None,
    files: Mapping[str, BinaryIO] | None = None,
    began: Callable[[RunFolder], object] = lambda _: None,
) -> Any:
    """Run a task on the hosts of an engine; return the function's value at rank 0.

    An elastic task is a run with a run folder. Any other one has fixed ranks.

    Args:
        sizes: numbers of processes.
        address: address of this machine by which the hosts reach it.
        options: some of :data:`OPTIONS`, for an elastic run.
        files: open files that each host gets into its folder before it is used, by name.
        began: called with the run folder of an elastic task.

    Raises:
        ArgumentError: an option is not known or cannot be used, or the task cannot be pickled.
        RunError: it raised an exception, or the hosts do not suffice.
    """
    options = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in (options or {}).items()
    }
    if unknown := options.keys() - set(OPTIONS):
        raise ArgumentError(
            f"{', '.join(sorted(unknown))}: no option of a run; valid are {', '.join(OPTIONS)}"
        )
    if options and not sizes.elastic:
        raise ArgumentError(
            f"{task.name} has fixed ranks (elastic=False), and options of a run "
            f"({', '.join(options)}) are for elastic ones: leave one of them out"
        )
    if options.get("tensorboard"):
        check_tensorboard("the option tensorboard")
    with tempfile.TemporaryFile() as packed:  # without a name, so that no end leaves it behind
        packed.write(task.pack())
        having = functools.partial(_hosts, address, acquire, {TASK_FILE: packed, **(files or {})})
        if not sizes.elastic:
            with having(None) as (hosts, check):
                return FixedRanks(hosts, sizes.wanted, _show_line, _tell, check).run()
        _check_values(options)
        run_id = options.pop("run_id", None) or None  # a new name for an empty one
        if (place := options.get("checkpoint_folder")) is not None and not is_url(str(place)):
            options["checkpoint_folder"] = str(Path(place).absolute())
        objective = Objective(
            options.pop("objective", Objective.kind),
            options.pop("min_speedup_per_slot", Objective.min_speedup_per_slot),
            deadline_s=options.pop("deadline_s", None),
            target=options.pop("target_examples", None),
        )
        spec = RunSpec(
            command=COMMAND,
            cwd=".",
            engine=engine,
            min_np=sizes.fewest,
            max_np=sizes.limit,
            objective=objective,
            **options,
        )
        folder, resumed = _run_folder(run_id, spec)
        began(folder)
        if spec.checkpoint_folder is not None:
            UnfinishedNote(spec.checkpoint_folder, folder.run_id, engine).write()
        with having(folder.hosts) as (hosts, check):
            hosts.wait_for(sizes.wanted, check, _CALM_S, least=spec.min_np)
            if hosts.slots < sizes.wanted:
                wanted = count(sizes.wanted, "process")
                _tell(f"training begins with {hosts.slots} of {wanted}; others join when they come")
            spec = replace(spec, hostfile=str(folder.hosts))
            return _lead(spec, folder, hosts, check, resumed=resumed)


def _check_values(options: Mapping[str, Any]) -> None:
    """Check options as ``hvd-elastic run`` does.

    Raises:
        ArgumentError: one has a value that cannot be used.
    """
    parts = ("objective", "min_speedup_per_slot", "deadline_s", "target_examples")
    given = {name.removesuffix("_s"): options.get(name) for name in parts}
    given = {name: value for name, value in given.items() if value is not None}
    of_spec = {name: value for name, value in options.items() if name not in (*parts, "run_id")}
    if of_spec.get("checkpoint_folder") is not None:  # it may be a Path
        of_spec["checkpoint_folder"] = str(of_spec["checkpoint_folder"])
    goal = {
        "kind": given.get("objective", Objective.kind),
        "min_speedup_per_slot": given.get("min_speedup_per_slot", Objective.min_speedup_per_slot),
        "deadline_s": given.get("deadline"),
        "target": given.get("target_examples"),
    }
    try:
        msgspec.convert(goal, Objective)
        msgspec.convert({**of_spec, "command": COMMAND, "cwd": "."}, RunSpec)
        check_choices(options)
        policy = options.get("policy", RunSpec.policy)
        names = {"deadline": "deadline_s", "budget": ""}
        check_objective(policy, given, lambda name: names.get(name, name))
        check_patience(
            options.get("failure_timeout_s", RunSpec.failure_timeout_s), "failure_timeout_s"
        )
        for name, least in _LEAST.items():
            if not least <= options.get(name, least) < math.inf:
                raise UsageError(f"{name} is {options[name]}; it must be {least} or more")
        for name in _ABOVE_0:
            if (value := options.get(name)) is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} is {value}; it must be a number above 0")
    except (UsageError, msgspec.ValidationError) as error:
        raise ArgumentError(f"options of the run: {error}") from None


def _run_folder(run_id: str | None, spec: RunSpec) -> tuple[RunFolder, bool]:
    """Return the folder of a new run, or of the one that this program is to continue.

    That is the run of this name, or without a name the one whose checkpoints are in the place that
    is given, if it was led by such a program and has not finished. Where its folder is not here, a
    note in the place has to say so.

    Returns:
        The folder, and whether the run has begun before.

    Raises:
        HvdElasticError: the run has finished, is led by another process, or has its checkpoints
            elsewhere; or those of another run are in the place.
    """
    place = spec.checkpoint_folder
    owner = None if place is None else _owner_of(place)
    name = run_id or owner
    folder = None if name is None else RunFolder.find(name)
    again = f"its program on {spec.engine} once more, with the same run_id or checkpoint_folder"
    fields = {**spec.as_dict(), "resume": again}
    if folder is None or folder.read_run().get("engine") != spec.engine:
        if place is not None:
            if owner and run_id and (known := RunFolder.find(owner)):
                if known.read_run().get("engine") == spec.engine:
                    raise RunError(
                        f"{place} holds checkpoints of run {owner}: leave run_id out to continue "
                        f"that run, or give run {run_id} a checkpoint_folder of its own"
                    )
            had_another_home = folder is None and name == owner
            if owner and had_another_home and UnfinishedNote(place, owner, spec.engine).is_there:
                check_new_place(place, owner)
                _tell(f"run {owner} continues from its checkpoints in {place}; its folder is new")
                return RunFolder.create(owner, {**fields, "began_elsewhere": True}), True
            check_new_place(place)
        return RunFolder.create(run_id, fields), False
    before = folder.read_run().get("checkpoint_folder")
    resumed = folder.began_elsewhere or summarize(folder.iter_events()).attempts > 0
    if (resumed and before != place) or (owner or name) != name:
        raise RunError(
            f"run {name} has its checkpoints in {before or folder.checkpoints}, and continues with "
            "that checkpoint_folder alone; give a new run a run_id and checkpoint_folder of its own"
        )
    check_not_complete(folder)
    folder.take_lead().close()  # refused while another process leads it
    _tell(f"run {name} continues")
    folder.write_run(fields)
    return folder, resumed


def _owner_of(place: str) -> str | None:
    """Return the run whose checkpoints are in a folder or URL; None: there are none with a name."""
    found = CheckpointUrl(place).find(Path()) if is_url(place) else find_checkpoints(place)
    return next((each.run for each in found if each.run), None)


def on_this_machine(slots: int, env: Mapping[str, str] | None = None) -> Acquire:
    """Return what makes this machine the one host of a run.

    Args:
        env: variables for all that runs there, beside those of this process.
    """

    @contextlib.contextmanager
    def acquire(hosts: DialInHosts) -> Iterator[Check]:
        process = HostProcess(hosts.dial_in.invitation, "localhost", slots, env)

        def check() -> None:
            if process.ended:
                process.wait()
                raise RunError("the host process of this machine has ended")

        try:
            yield check
        finally:
            process.wait()

    return acquire


@contextlib.contextmanager
def _hosts(
    address: str, acquire: Acquire, files: Mapping[str, BinaryIO], hostfile: Path | None
) -> Iterator[tuple[DialInHosts, Check]]:
    """Yield the hosts that dial in, and a check whether more are to come."""
    try:
        hosts = DialInHosts(hostfile, address, _tell, files)
    except OSError as error:
        raise RunError(
            f"hosts cannot dial in at {address}: {error.strerror}. It has to be an address of this "
            "machine that the hosts reach"
        ) from error
    try:
        with acquire(hosts) as check:
            try:
                yield hosts, check
            finally:
                hosts.close()  # before the engine is asked to end what it has started
    finally:
        hosts.close()


def _lead(
    spec: RunSpec, folder: RunFolder, hosts: DialInHosts, check: Check, *, resumed: bool
) -> Any:
    """Lead an elastic run; return the function's value."""
    failure: list[ScriptFailed] = []
    leaving = set[str]()
    with _own_signals(), LastingView(sys.stderr, live=False) as view:

        def show(event: Event) -> None:
            match event:
                case ScriptFailed():
                    failure.append(event)
                case HostDraining(host=host, asked=True):
                    leaving.add(host)  # others go by themselves, and others take their place
                case HostReturned(host=host):
                    leaving.discard(host)
            view.show(event)
            if isinstance(event, HostDrained) and event.host in leaving:
                hosts.release_host(event.host)

        def show_output(_host: str, _slot: int, line: str) -> None:
            _show_line(0, line)

        with _stopped_if_hopeless(folder, check):
            engine = contextlib.nullcontext(hosts)
            finish, _ = lead(spec, folder, {}, show, show_output, resumed=resumed, engine=engine)
    if finish.status == "stopped":
        raise KeyboardInterrupt(finish.message)
    if finish.status != "succeeded":
        text = failure[0].traceback.rstrip() if failure else ""
        more = "" if text in finish.message else f"\n{text}"
        raise RunError(f"run {folder.run_id} failed: {finish.message}{more}")
    if spec.checkpoint_folder is not None:
        UnfinishedNote(spec.checkpoint_folder, folder.run_id, spec.engine).remove()
    return Outcome.unpack((folder.saved / OUTCOME_FILE).read_bytes()).get("rank 0")


@contextlib.contextmanager
def _stopped_if_hopeless(folder: RunFolder, check: Check) -> Iterator[None]:
    """Have the run stopped when no more hosts are to come; then raise the reason."""
    hopeless: list[RunError] = []

    def look() -> bool:
        try:
            check()
        except RunError as error:
            folder.send_request("stop")
            hopeless.append(error)
        return bool(hopeless)

    with repeating("engine", _LOOK_S, look):
        yield
    if hopeless:
        raise hopeless[0]


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Give the caller's program its handlers of signals back after the leader has set its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _show_line(rank: int, line: str) -> None:
    sys.stdout.write(f"{line}\n" if rank == 0 else f"[rank {rank}] {line}\n")
    sys.stdout.flush()


def _tell(text: str) -> None:
    sys.stderr.write(f"hvd_elastic: {text}\n")
    sys.stderr.flush()
