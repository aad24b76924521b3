"""Keeps a study: what it searches, in ``study.json``, and its trials, in a journal of Optuna.

    searches/<name>/
      study.json       what is searched, and how
      journal.log      trials with their parameters and results (``optuna-dashboard journal.log``)
      lock             locked while a process searches
      stop             is there if the user has ended the study
      search.log       output of a search in the background

Only the process that holds the lock writes.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from hvd_elastic.config import home
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.jobs.job import JobRequest, encode_job
from hvd_elastic.own_files import private_folder
from hvd_elastic.records.json_lines import without_nan
from hvd_elastic.records.process_lock import is_locked, take_lock
from hvd_elastic.replaced_files import write_whole
from hvd_elastic.search.rungs import judged_value
from hvd_elastic.search.space import Space, fill, of_file, parse_param
from hvd_elastic.search.trials import Point, Rules, Trial, TrialStatus

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.storages.journal import JournalStorage
    from optuna.study import Study as OptunaStudy
    from optuna.trial import FrozenTrial

SAMPLERS = ("tpe", "random", "grid", "gp")
_STATES = {
    TrialStatus.DONE: "COMPLETE",
    TrialStatus.FAILED: "FAIL",
    TrialStatus.PRUNED: "PRUNED",
    TrialStatus.STOPPED: "PRUNED",
}
"""How a trial ends, and how Optuna names it."""
_VALUES, _END = "values", "end"
"""User attributes of Optuna's trials: values of the placeholders, and how the trial ended."""
_KEPT = ("examples", "slot_s", "job", "run_id", "reason")
"""What else is kept of a trial that has ended."""
_REPORTED = 1.02
"""Growth of the examples from which on the next point goes into the journal before the end."""


@dataclass(frozen=True)
class Definition:
    """What a study searches, and how.

    Attributes:
        metric: name of the metric.
        request: the job of a trial, with placeholders in its command.
        cluster: folder of the cluster.
        params: the parameters, as ``--param`` has them; empty: those that ``space`` asks for.
        space: path of a file with a function ``suggest``; None: there is none.
        seed: of the sampler.
        token: unlike that of any other study.
    """

    metric: str
    rules: Rules
    request: JobRequest
    cluster: str
    params: tuple[str, ...] = ()
    space: str | None = None
    sampler: str = "tpe"
    seed: int = 0
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    created: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        """Name of the study."""
        return self.request.name

    @property
    def values(self) -> Space:
        """Values of the parameters."""
        return dict(map(parse_param, self.params))

    @property
    def _options(self) -> bytes:
        """What is asked for the jobs beside their command, as it is written."""
        spec = {**self.request.spec, "command": None, "cwd": None}
        return msgspec.json.encode(replace(self.request, spec=spec))

    def differences(self, other: Definition) -> list[str]:
        """Return what differs between two definitions of a study of one name, in words."""
        pairs = {
            "parameters": (self.params, other.params),
            "file of the parameters": (self.space, other.space),
            "metric": (self.metric, other.metric),
            "goal": (self.rules.goal, other.rules.goal),
            "rungs": (self.rules.rung_examples, other.rules.rung_examples),
            "sampler": (self.sampler, other.sampler),
            "command": (self.request.words, other.request.words),
            "folder": (self.request.spec.get("cwd"), other.request.spec.get("cwd")),
            "cluster": (self.cluster, other.cluster),
            "options of its jobs": (self._options, other._options),
        }
        return [what for what, (one, two) in pairs.items() if one != two]


def searches_folder() -> Path:
    """Return the folder that holds one folder for each study."""
    return home() / "searches"


def study_names() -> list[str]:
    """Return the names of the studies of this user."""
    return sorted(path.parent.name for path in searches_folder().glob("*/study.json"))


class Study:
    """The folder of a study, and its trials.

    Use :meth:`create` for a new one and :meth:`open` for one that there is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.log = folder / "search.log"
        self.stop_request = folder / "stop"
        self._lock = folder / "lock"
        self._journal = folder / "journal.log"
        self._is_writer = False
        self.definition = self._read()
        self._trials: list[Trial] = []
        self._reported: dict[int, float] = {}
        """Examples at the last point of a trial that is in the journal."""
        self._opened: tuple[JournalStorage, OptunaStudy] | None = None

    @classmethod
    def create(cls, definition: Definition) -> Study:
        """Create a study, or return the one that was defined so before.

        One whose trials have ended without the metric gives way to a new one.

        Raises:
            UsageError: there is another one of that name.
            RunError: the folder cannot be made, or a process searches there.
        """
        folder = searches_folder() / definition.name
        try:
            private_folder(searches_folder())
            private_folder(folder)
            lock = take_lock(folder / "lock")
        except OSError as error:
            raise RunError(
                f"cannot make the folder {folder}: {error.strerror}. Free space or mend the "
                "permissions there, or set HVD_ELASTIC_HOME to a folder elsewhere"
            ) from error
        with lock or contextlib.nullcontext():
            if lock is None and not (folder / "study.json").exists():
                raise _searched(definition.name)  # another process is about to define it
            if (folder / "study.json").exists():
                found = cls(folder)
                differing = found.definition.differences(definition)
                trials = found.trials()
                is_used = lock is None or any(t.points or t.status.active for t in trials)
                if not differing and (is_used or not trials):
                    return found
                if is_used:
                    raise UsageError(
                        f"there is a study {definition.name} already, with other values of: "
                        f"{', '.join(differing)}. Give this one another --name, or continue that "
                        f"one: hvd-elastic search resume {found.name}"
                    )
                for path in folder.iterdir():
                    if path != found._lock:
                        path.unlink()
            _write(folder, definition)
            return cls(folder)

    @classmethod
    def open(cls, name: str) -> Study:
        """Return the study of a name.

        Raises:
            RunError: there is none; the message names those that there are.
        """
        folder = searches_folder() / name
        if "/" in name or not (folder / "study.json").exists():
            names = ", ".join(study_names()) or "none"
            raise RunError(
                f"there is no study {name!r} in {searches_folder()}; there is: {names}. Start one "
                "with: hvd-elastic search --param …"
            )
        return cls(folder)

    def set_rules(self, rules: Rules) -> None:
        """Change how much the study searches: its trials and its deadline."""
        self.definition = replace(self.definition, rules=rules)
        _write(self.folder, self.definition)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock that makes this process the one that writes.

        Raises:
            RunError: another process searches, or another study has this name by now.
        """
        lock = take_lock(self._lock)
        if lock is None:
            raise _searched(self.name)
        with lock:
            token, self.definition = self.definition.token, self._read()
            if self.definition.token != token:
                raise RunError(
                    f"another study {self.name} was started meanwhile. See it with: hvd-elastic "
                    f"search show {self.name}   Give this one another --name"
                )
            # That of a writer that was killed, for which others would wait for half a minute.
            Path(f"{self._journal}.lock").unlink(missing_ok=True)
            _mend(self._journal)
            self._is_writer = True
            yield
            self._is_writer = False

    @property
    def is_running(self) -> bool:
        """Whether a process searches now."""
        return is_locked(self._lock)

    # -- trials ----------------------------------------------------------------------------

    def trials(self) -> list[Trial]:
        """Return the trials in the journal, by number: what they reported only if they ended."""
        kept: list[FrozenTrial] = []
        if self._journal.exists():
            with contextlib.suppress(_NoStudyYetError), self._readable():
                kept = self._study.get_trials(deepcopy=False)
        for number, frozen in enumerate(kept):
            if number >= len(self._trials):
                self._trials.append(_trial_of(frozen))
            elif self._trials[number].status.active and frozen.state.is_finished():
                self._trials[number] = _trial_of(frozen)
        return [*self._trials]

    def add_trial(self, trials: Sequence[Trial]) -> Trial:
        """Choose the parameters of another trial, and write it into the journal.

        Args:
            trials: all trials as they are now.

        Raises:
            UsageError: ``suggest`` of the user's file fails, or leaves out a placeholder.
        """
        kept = self._study.get_trials(deepcopy=False)
        import optuna

        definition, number = self.definition, len(trials)
        with _quiet():
            view = optuna.create_study(
                direction=self._direction, sampler=_sampler(definition, number)
            )
            view.add_trials(
                [_seen(each, trial, definition) for each, trial in zip(kept, trials, strict=True)]
            )
            asked = view.ask(dict(definition.values))
            values = asked.params
            if definition.space is not None:
                values = dict(of_file(Path(definition.space))(asked))
            fill(definition.request.words, values, number)  # or else none could be submitted
            made = optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING,
                params=asked.params,
                distributions=asked.distributions,
                user_attrs={_VALUES: {name: _plain(value) for name, value in values.items()}},
            )
            self._study.add_trial(made)
        return _trial_of(self._study.get_trials(deepcopy=False)[number])

    def report(self, trial: Trial) -> None:
        """Write the newest point of a trial into the journal if its examples have grown enough."""
        last = self._reported.get(trial.number, 0.0)
        if trial.points and trial.points[-1][0] >= _REPORTED * last:
            self._write_point(trial, *self._frozen(trial))

    def _write_point(self, trial: Trial, storage: JournalStorage, frozen: FrozenTrial) -> None:
        examples, value, _ = trial.points[-1]
        storage.set_trial_intermediate_value(frozen._trial_id, int(examples), float(value))
        self._reported[trial.number] = examples

    def end_trial(self, trial: Trial) -> None:
        """Write how a trial has ended."""
        from optuna.trial import TrialState

        storage, frozen = self._frozen(trial)
        if frozen.state.is_finished():
            return
        if trial.points:
            self._write_point(trial, storage, frozen)
        end = {name: getattr(trial, name) for name in _KEPT}
        end |= {"status": trial.status.value, "points": without_nan(trial.points)}
        storage.set_trial_user_attr(frozen._trial_id, _END, end)
        rules = self.definition.rules
        is_done = trial.status is TrialStatus.DONE
        values = [rules.number_of(judged_value(rules, trial))] if is_done else None
        storage.set_trial_state_values(frozen._trial_id, TrialState[_STATES[trial.status]], values)

    def _frozen(self, trial: Trial) -> tuple[JournalStorage, FrozenTrial]:
        storage, study = self._open()
        return storage, study.get_trials(deepcopy=False)[trial.number]

    # -- Optuna ----------------------------------------------------------------------------

    @property
    def _direction(self) -> Literal["maximize", "minimize"]:
        return "maximize" if self.definition.rules.goal == "max" else "minimize"

    @property
    def _study(self) -> OptunaStudy:
        return self._open()[1]

    def _open(self) -> tuple[JournalStorage, OptunaStudy]:
        if self._opened is None:
            require_optuna()
            import optuna
            from optuna.storages.journal import JournalFileBackend, JournalStorage

            with _quiet(), self._readable():
                storage = JournalStorage(JournalFileBackend(str(self._journal)))
                if self._is_writer and not storage.get_all_studies():
                    optuna.create_study(
                        storage=storage, study_name=self.name, direction=self._direction
                    )
                if not storage.get_all_studies():
                    raise _NoStudyYetError
                # Not create_study(load_if_exists=True), by which readers would write as well.
                study = optuna.load_study(study_name=self.name, storage=storage)
            self._opened = storage, study
        return self._opened

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Explain what Optuna raises for a journal that is damaged."""
        try:
            yield
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            raise _unreadable(self._journal, f"{type(error).__name__}: {error}") from error

    def _read(self) -> Definition:
        path = self.folder / "study.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Definition)
        except (OSError, msgspec.MsgspecError) as error:
            raise _unreadable(path, str(error)) from error


def require_optuna() -> None:
    """Check that Optuna is installed.

    Raises:
        UsageError: it is not.
    """
    try:
        import optuna
    except ImportError as error:
        raise UsageError(
            "a search needs Optuna 5, which is not installed here: "
            "pip install 'hvd-elastic[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # not of dynamic spaces, for one


class _NoStudyYetError(Exception):
    """The journal has no study: its writer has just begun."""


class StudyError(RunError):
    """A file of a study cannot be read."""


def _unreadable(path: Path, why: str) -> StudyError:
    return StudyError(
        f"{path} cannot be read ({why}). Remove the folder, or search under another name"
    )


def _searched(name: str) -> RunError:
    return RunError(
        f"a process searches already for study {name}. See its trials with: hvd-elastic search "
        f"show {name}   End it with: hvd-elastic search stop {name}"
    )


def _write(folder: Path, definition: Definition) -> None:
    path = folder / "study.json"
    try:
        write_whole(path, encode_job(definition), mode=0o600, synced=True)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error


def _mend(journal: Path) -> None:
    """Cut off an incomplete last line, as of a full disk, after which nothing could be read."""
    with contextlib.suppress(FileNotFoundError):
        size = journal.stat().st_size
        whole = journal.read_bytes().rfind(b"\n") + 1
        if whole < size:
            os.truncate(journal, whole)


def _trial_of(frozen: FrozenTrial) -> Trial:
    attributes = frozen.user_attrs
    trial = Trial(frozen.number, attributes.get(_VALUES, frozen.params))
    end: Mapping[str, Any] | None = attributes.get(_END)
    if end is None or not frozen.state.is_finished():
        return trial
    points = tuple(
        Point(examples, math.nan if value is None else value, at)
        for examples, value, at in end["points"]
    )
    return replace(trial, **{**end, "status": TrialStatus(end["status"]), "points": points})


def _seen(frozen: FrozenTrial, trial: Trial, definition: Definition) -> FrozenTrial:
    """Return a trial as the sampler is to see it.

    Optuna's samplers take a trial that runs for a bad one. One that is held, or trains on, has
    shown something already, so it is shown as one that was pruned where it is.
    """
    import optuna

    rules, points = definition.rules, trial.points
    values = [rules.number_of(point.value) for point in points]
    value: float | None = None
    state = optuna.trial.TrialState.RUNNING
    if trial.status is TrialStatus.FAILED:
        state = optuna.trial.TrialState.FAIL
    elif points and trial.status is TrialStatus.DONE:
        state, value = optuna.trial.TrialState.COMPLETE, values[-1]
    elif points:
        state = optuna.trial.TrialState.PRUNED
    if definition.sampler == "gp" and rules.rungs > 1 and points:
        # It learns from complete trials alone, and these from what all of them have reached.
        first = rules.rung_examples[0]
        reached = [place for place, point in enumerate(points) if point.examples >= first]
        if reached:
            state, value = optuna.trial.TrialState.COMPLETE, values[reached[0]]
    return optuna.trial.create_trial(
        state=state,
        value=value,
        params=frozen.params,
        distributions=frozen.distributions,
        system_attrs=frozen.system_attrs,
        intermediate_values={int(point.examples): values[-1] for point in points[-1:]},
    )


def _sampler(definition: Definition, number: int) -> BaseSampler:
    """Return the sampler for a trial; it knows nothing but the trials that it is shown."""
    from optuna import samplers

    seed = (definition.seed + number) % 2**32
    match definition.sampler:
        case "random":
            return samplers.RandomSampler(seed)
        case "gp":
            return samplers.GPSampler(seed=seed)
        case "grid":
            return samplers.BruteForceSampler(seed)
        case _:
            return samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out warnings of Optuna, such as of what is experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float)) else str(value)
