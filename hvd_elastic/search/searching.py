"""Searches: adds trials to the queue of a cluster, and holds, releases and ends them.

The process is a client of the cluster's daemon, as a user's commands are. It keeps nothing that is
not in the study's journal, in the queue or in the events of the runs, so it may be killed at any
moment and started again: a trial whose job is not known is submitted with a token, by which the
daemon knows it if it has it already.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvd_elastic.errors import RunError
from hvd_elastic.jobs.job import (
    Answer,
    Cancel,
    CancelCause,
    Hold,
    Hosts,
    Job,
    Release,
    SetPriority,
    Submit,
)
from hvd_elastic.jobs.place import ClusterFolder, clusters_folder
from hvd_elastic.jobs.rights import open_queue, user_name
from hvd_elastic.jobs.secrets import JobSecrets
from hvd_elastic.jobs.server import RefusedError, ask_daemon
from hvd_elastic.jobs.store import JobStore
from hvd_elastic.search.progress import TrialProgress
from hvd_elastic.search.rungs import decide, judged_value, rank_trials, rungs_reached
from hvd_elastic.search.space import fill
from hvd_elastic.search.study import Study, StudyError
from hvd_elastic.search.trials import Decision, Trial, TrialStatus

_ALL_FAIL = 3
"""Trials that fail, before any has trained, after which the study ends."""
_NUMBER = re.compile(r"\d+")


def cluster_of(study: Study) -> ClusterFolder:
    """Return the cluster of a study."""
    path = Path(study.definition.cluster)
    return ClusterFolder(path, shared=path.parent != clusters_folder())


class Search:
    """Looks at the trials of a study, and searches; for the latter, the caller holds its lock.

    Args:
        tell: called with what happens, a line each.
        start_keeper: starts a keeper of this user, where the daemon is another user's.

    Attributes:
        trials: the trials as they were last seen.
        reasons: why they are held or continue, as last decided.
    """

    def __init__(
        self,
        study: Study,
        tell: Callable[[str], None] = lambda _: None,
        start_keeper: Callable[[ClusterFolder], None] = lambda _: None,
    ) -> None:
        self.study = study
        self.trials: list[Trial] = []
        self.reasons: dict[int, str] = {}
        self._tell = tell
        self._start_keeper = start_keeper
        self._place = cluster_of(study)
        # Where the daemon is another user's, it writes this user's name.
        self._by = user_name(os.getuid()) if self._place.is_others else f"search {study.name}"
        self._progress: dict[int, TrialProgress] = {}
        self._jobs: dict[int, Job] = {}
        """Jobs of the trials that may still train."""
        self._ended: list[Trial] = []
        """Trials that have ended since this process began."""
        self._told: dict[int, TrialStatus] = {}
        self._failure = self._why = ""
        self._trouble = ""

    def step(self, now: float) -> str:
        """Look at the trials once, and do what is due.

        Args:
            now: present time [Unix s].

        Returns:
            Why the study has ended; empty: it has not.

        Raises:
            RunError: it has ended since all trials fail, or none reports the metric; or the daemon
                refuses the trials, or the journal cannot be read.
        """
        try:
            self.look(now)
            while self._end_trials():  # the last look may have seen further ones that have ended
                self.look(now)
            definition = self.study.definition
            asked, slots = definition.request, self._usable_slots()
            sizes = asked.min_np, asked.max_np
            decision = decide(self.trials, definition.rules, slots, now, *sizes)
            self.reasons |= decision.reasons
            has_trained = any(trial.points or trial.examples for trial in self.trials)
            if len(self._ended) >= _ALL_FAIL and not has_trained:
                self._failure = self._failure or self._common_failure(self._ended)
            why = "stopped by its user" if self.study.stop_request.exists() else decision.finished
            if why or self._failure:
                return self._finish(why, decision.hold)
            self._act(decision)
        except (RefusedError, StudyError):
            raise
        except RunError as error:  # the daemon is not there, or its queue cannot be read
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._tell(f"{error}. Trials that run continue meanwhile")
        else:
            self._trouble = ""
        return ""

    # -- looking ---------------------------------------------------------------------------

    def ranked(self, now: float) -> list[Trial]:
        """Return the trials as they are, the best first, with why each is held or continues."""
        self.look(now)
        rules = self.study.definition.rules
        reasons = decide(self.trials, rules, 0, now).reasons
        told = [replace(t, reason=reasons.get(t.number) or t.reason) for t in self.trials]
        return rank_trials(rules, told)

    def look(self, now: float) -> None:
        """Look at all trials as their jobs and their runs are."""
        kept = self.study.trials()
        active = [trial.number for trial in kept if trial.status.active]
        self._jobs = self._jobs_of(active) if active else {}
        # The jobs first: what a run has told before its end is read then.
        self.trials = [
            self._progress_of(trial.number).of(trial, self._jobs[trial.number], now)
            if trial.number in self._jobs
            else trial
            for trial in kept
        ]

    def _jobs_of(self, numbers: Sequence[int]) -> dict[int, Job]:
        """Return the jobs of trials as they are now; those that were not submitted are left out."""
        with contextlib.closing(open_queue(self._place)) as store:
            known = {n: self._jobs.get(n) or self._submitted(store, n) for n in numbers}
            jobs = store.jobs([job.number for job in known.values() if job is not None])
        return {n: jobs[job.number] for n, job in known.items() if job and job.number in jobs}

    def _submitted(self, store: JobStore, number: int) -> Job | None:
        """Return the job of a trial; None: it was not submitted."""
        found = store.find(self._name(number))
        return next((job for job in found if job.request.token == self._token(number)), None)

    def _progress_of(self, number: int) -> TrialProgress:
        if number not in self._progress:
            metric = self.study.definition.metric
            self._progress[number] = TrialProgress(metric, self._jobs[number].run_id)
        self._progress[number].poll()
        return self._progress[number]

    def _usable_slots(self) -> int:
        rows = ask_daemon(self._place, Hosts()).data
        return sum(row["slots"] for row in rows if row["state"] == "up")

    # -- trials that have ended ------------------------------------------------------------

    def _end_trials(self) -> bool:
        """Write down which trials have ended, and how; return whether any has."""
        ended = False
        for trial in self.trials:
            if trial.number not in self._jobs:
                continue
            self.study.report(trial)
            if not trial.status.active:
                trial = self._judged(trial)
                self.study.end_trial(trial)
                del self._progress[trial.number]
                self._ended.append(trial)
                ended = True
            self._tell_trial(trial)
        return ended

    def _judged(self, trial: Trial) -> Trial:
        """Return a trial whose job has ended as what it is in the study."""
        definition = self.study.definition
        if trial.status is TrialStatus.DONE and not trial.points:
            others = ", ".join(sorted(self._progress[trial.number].others)) or "nothing"
            why = f"it never reported {definition.metric!r}; it reported {others}"
            if not any(other.points for other in self.trials):
                self._failure = self._failure or (
                    f"trial {trial.number} has ended, and {why}. Give --metric the name that the "
                    "script reports (hvd.report, or the logs of Keras, Lightning or Hugging Face); "
                    f"its output: hvd-elastic logs {trial.run_id}"
                )
            return replace(trial, status=TrialStatus.FAILED, reason=why)
        cancelled = self._jobs[trial.number].request.cancelled
        if cancelled is not None and cancelled.cause is CancelCause.STUDY:
            return replace(trial, reason=self._why or trial.reason)
        return trial

    def _common_failure(self, ended: Sequence[Trial]) -> str:
        """Return why all trials that have ended have failed; empty: they have not."""
        if not ended or any(trial.status is not TrialStatus.FAILED for trial in ended):
            return ""
        causes = Counter(_NUMBER.sub("#", trial.reason) for trial in ended)
        cause, times = causes.most_common(1)[0]
        first = next(trial for trial in ended if _NUMBER.sub("#", trial.reason) == cause)
        alike = "" if times == len(ended) else f", {times} of them alike"
        return (
            f"all {len(ended)} trials that have ended have failed{alike}: {first.reason}. See: "
            f"hvd-elastic logs {first.run_id}"
        )

    def _finish(self, why: str, at_rung: Collection[int]) -> str:
        """End all jobs; return why the study has ended when they have.

        Args:
            at_rung: trials that would be held now.
        """
        self._why = why
        if active := [number for number, job in self._jobs.items() if job.status.active]:
            self._cancel(active, at_rung)
            return ""
        definition = self.study.definition
        for trial in self.trials:
            if trial.status.active:  # it was never submitted
                self.study.end_trial(replace(trial, status=TrialStatus.STOPPED, reason=why))
        if self.study.stop_request.exists():
            return why
        if self._failure:
            raise RefusedError(self._failure)
        if any(math.isfinite(judged_value(definition.rules, trial)) for trial in self.trials):
            return why
        ended = [trial for trial in self.trials if trial.status is not TrialStatus.STOPPED]
        raise RefusedError(
            self._common_failure(ended)
            or f"the study has ended ({why}), and no trial has reported a number for "
            f"{definition.metric}. See: hvd-elastic search show {self.study.name}"
        )

    # -- acting ----------------------------------------------------------------------------

    def _act(self, decision: Decision) -> None:
        held = {n: job for n, job in self._jobs.items() if job.request.hold}
        self._ask(Hold, [self._jobs[n].number for n in decision.hold if n not in held], self._by)
        self._cancel([*decision.end, *self._beyond()])
        ours = [
            j.number
            for n, j in held.items()
            if n in decision.release and j.request.hold == self._by
        ]
        self._ask(Release, ours)
        by_priority: dict[float, list[int]] = defaultdict(list)
        for number, priority in decision.priorities.items():
            wanted = priority * self.study.definition.request.priority
            if (job := self._jobs.get(number)) and not math.isclose(job.request.priority, wanted):
                by_priority[wanted].append(job.number)
        for wanted, jobs in by_priority.items():
            self._ask(SetPriority, jobs, wanted)
        for trial in self.trials:  # whose submission was cut short
            if trial.status.active and trial.number not in self._jobs:
                self._submit(trial)
        for _ in range(decision.add):
            trial = self.study.add_trial(self.trials)
            self.trials.append(trial)
            self._submit(trial)

    def _cancel(self, numbers: Sequence[int], at_rung: Collection[int] = ()) -> None:
        """End the jobs of trials, each for its own cause; not those that are being ended.

        Args:
            at_rung: trials that are at a rung but were not held yet.
        """
        rules = self.study.definition.rules
        last = rules.rung_examples[-1:]
        causes: dict[CancelCause, list[int]] = defaultdict(list)
        for number in dict.fromkeys(numbers):
            trial, job = self.trials[number], self._jobs.get(number)
            if job is None or job.request.cancelled is not None:
                continue
            cause = CancelCause.STUDY
            if last and trial.examples >= last[0]:
                cause = CancelCause.TRAINED
            elif number in at_rung or (
                trial.status is TrialStatus.HELD and rungs_reached(rules, trial)
            ):
                cause = CancelCause.AT_RUNG
            causes[cause].append(job.number)
        for cause, jobs in causes.items():
            self._ask(Cancel, jobs, self._by, cause)

    def _beyond(self) -> list[int]:
        """Return trials that have trained past the last rung and never reported the metric."""
        last = self.study.definition.rules.rung_examples[-1:]
        return [t.number for t in self.trials if last and not t.points and t.examples > last[0]]

    def _ask(self, kind: type[Any], jobs: Sequence[int], *more: Any) -> None:
        """Ask the daemon to change jobs; those that have ended meanwhile are seen next time."""
        if jobs:
            with contextlib.suppress(RefusedError):
                self._start_if_needed(ask_daemon(self._place, kind([*jobs], *more)))

    def _submit(self, trial: Trial) -> None:
        """Submit the job of a trial, unless the daemon has it."""
        asked = self.study.definition.request
        name, token = self._name(trial.number), self._token(trial.number)
        spec = {**asked.spec, "command": fill(asked.words, trial.params, trial.number)}
        if folder := spec.get("checkpoint_folder"):  # which is for one run
            spec["checkpoint_folder"] = f"{folder}/{name}"
        request = replace(asked, name=name, spec=spec, token=token)
        environment = dict(os.environ)
        if self._place.is_others:
            request = JobSecrets(self._place).keep(replace(request, secret=token), environment)
            environment = {}
        answer = ask_daemon(self._place, Submit([request], environment))
        self._start_if_needed(answer)
        self._tell(f"trial {trial.number}: job {answer.jobs[0]}, {_params_words(trial.params)}")

    def _start_if_needed(self, answer: Answer) -> None:
        if answer.needs_keeper:
            self._start_keeper(self._place)

    def _name(self, number: int) -> str:
        return f"{self.study.name}.{number}"

    def _token(self, number: int) -> str:
        return f"{self.study.definition.token}.{number}"

    def _tell_trial(self, trial: Trial) -> None:
        before, self._told[trial.number] = self._told.get(trial.number), trial.status
        if trial.status is before or trial.status is TrialStatus.WAITING:
            return
        words = f"trial {trial.number}: {trial.status.value}"
        if trial.points:
            point = trial.points[-1]
            words += f", {self.study.definition.metric} {point.value:.6g} at {point.examples:,.0f}"
            words += " useful examples"
        why = self.reasons.get(trial.number, "") if trial.status.active else trial.reason
        if trial.status is not TrialStatus.RUNNING and why:
            words += f"; {why}"
        self._tell(words)


def _params_words(params: Mapping[str, Any]) -> str:
    """Return parameters in words.

    >>> _params_words({"lr": 0.0123456, "act": "relu"})
    'lr 0.01235, act relu'
    """
    shown = {n: f"{v:.4g}" if isinstance(v, float) else str(v) for n, v in params.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())
