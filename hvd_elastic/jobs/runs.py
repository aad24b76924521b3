"""Starts, finds and ends the runs of jobs; each has a leader process of its own."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvd_elastic.config import runs_folder
from hvd_elastic.errors import HostfileError, RunError
from hvd_elastic.hosts.hostfile import Host, parse_hostfile, write_hostfile
from hvd_elastic.jobs.job import Job, JobKind
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.progress import RunProgress
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder

BeginLeader = Callable[[RunSpec, RunFolder, Mapping[str, str], bool], int]
"""Starts the leader of a run in a process of its own that outlives this one; returns its process
id. Arguments: specification, run folder, environment, whether the run had a leader before."""

INDEX_VARIABLE = "HVD_ELASTIC_ARRAY_INDEX"
"""Environment variable with the index of a job in its array."""
_STARTING_S = 5.0
"""How long a leader that an earlier daemon started may take to lock its run folder [s]."""
_LOG_BYTES = 4096


class JobRuns:
    """The runs of a cluster's jobs.

    Args:
        ssh_config: ssh configuration of the cluster; None: the user's own.
    """

    def __init__(
        self, place: ClusterFolder, ssh_config: str | None, begin_leader: BeginLeader
    ) -> None:
        self._place = place
        self._ssh_config = ssh_config
        self._begin_leader = begin_leader
        self._began_at = time.monotonic()
        self._children: dict[str, int] = {}
        self._started: set[tuple[str, int]] = set()
        self._progress: dict[str, RunProgress] = {}
        self._devices = Devices()
        self._asked_to_stop: set[tuple[str, int]] = set()

    def progress(self, job: Job) -> RunProgress:
        """Return what the events of the job's run say; new ones are read by its ``poll``."""
        found = self._progress.get(job.run_id)
        if found is None:
            found = self._progress[job.run_id] = RunProgress(_folder(job))
            found.poll()
        return found

    def forget(self, job: Job) -> None:
        """Drop what is kept of the run of a job that has ended."""
        self._progress.pop(job.run_id, None)
        self._devices.forget(job.run_id)
        for attempts in (self._started, self._asked_to_stop):
            attempts.difference_update([each for each in attempts if each[0] == job.run_id])
        self.hostfile(job).unlink(missing_ok=True)

    # -- start and end ---------------------------------------------------------------------

    def take_up(self, job: Job, hosts: Iterable[Host]) -> None:
        """Take over what an earlier daemon has given to a job that runs.

        Raises:
            RunError: the hostfile of the job cannot be written.
        """
        written = self.written_hosts(job)
        self._devices.restore(job.run_id, written)
        if {host.name: host.slots for host in written} != dict(job.held):
            self.write_hostfile(job, hosts)  # that daemon was killed before it could

    def written_hosts(self, job: Job) -> Sequence[Host]:
        """Return the hosts of a job's hostfile as it was written last."""
        try:
            return parse_hostfile(self.hostfile(job)).hosts
        except HostfileError:
            return ()

    def release(self, job: Job, *, ended: bool = False) -> None:
        """Free the GPUs in which no process of a job is left; all that it has if its run ended."""
        if ended:
            self._devices.forget(job.run_id)
            self.hostfile(job).unlink(missing_ok=True)
        else:
            self._devices.release(job.run_id, job.held, self.progress(job).hosts.occupied)

    def start(self, job: Job, hosts: Iterable[Host], environment: Mapping[str, str]) -> None:
        """Start a leader for a job that holds slots, or one that leads its run on.

        Args:
            environment: variables of the shell that submitted it.

        Raises:
            RunError: the run folder or the hostfile cannot be written.
        """
        self.write_hostfile(job, hosts)
        request = job.request
        fields = {
            **request.spec,
            "hostfile": str(self.hostfile(job)),
            "ssh_config": request.spec.get("ssh_config") or self._ssh_config,
            "min_np": request.min_np,
            "np": None,
            "max_np": None,
            "plain": request.kind is JobKind.PLAIN,
            "policy": "fixed",
        }
        spec = RunSpec.from_dict(fields, job.run_id)
        folder = _folder(job)
        if not folder.path.exists():
            folder = RunFolder.create(
                job.run_id, {**spec.as_dict(), "cluster": self._place.name, "job": job.number}
            )
        resumed = folder.events.exists()
        if request.array_index is not None:
            environment = {**environment, INDEX_VARIABLE: str(request.array_index)}
        self._started.add((job.run_id, job.attempts))
        self._children[job.run_id] = self._begin_leader(spec, folder, environment, resumed)

    def is_led(self, job: Job) -> bool:
        """Return whether a process leads the run of a job, or is about to."""
        child = self._children.get(job.run_id)
        if child is not None:
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(child, os.WNOHANG)
                if not ended:
                    return True
                if os.WIFSIGNALED(status):  # it was killed, which is no fault of the job
                    self._started.discard((job.run_id, job.attempts))
            del self._children[job.run_id]
        folder = _folder(job)
        if folder.leader_alive():
            return True
        if (job.run_id, job.attempts) in self._started:
            return False
        # A daemon that was killed may just have started it.
        fresh = job.started_at is not None and time.time() - job.started_at < _STARTING_S
        started_before = time.monotonic() - self._began_at < _STARTING_S
        return fresh and started_before and not self._has_begun(job)

    def failed_to_begin(self, job: Job) -> bool:
        """Return whether the leader that this daemon has started ended before the run began.

        If an earlier daemon was to start it, that one was probably killed before it did.
        """
        return not self._has_begun(job) and (job.run_id, job.attempts) in self._started

    def _has_begun(self, job: Job) -> bool:
        began = self.progress(job).began_at
        return began is not None and began >= (job.started_at or 0.0)

    def stop(self, job: Job, reason: str) -> None:
        """Ask the leader of a job's run to end it with a last checkpoint; asks only once."""
        attempt = (job.run_id, job.attempts)
        folder = _folder(job)
        if attempt in self._asked_to_stop or not folder.leader_alive():
            return
        with contextlib.suppress(RunError):  # the disk is full: it is asked again
            folder.send_request("stop", {"reason": reason})
            self._asked_to_stop.add(attempt)

    def why_not_begun(self, job: Job) -> str:
        """Return the last line that a leader wrote before it ended without an event."""
        try:
            with _folder(job).leader_log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1].removeprefix("error: ") if lines else "its leader did not begin"

    # -- hostfiles -------------------------------------------------------------------------

    def hostfile(self, job: Job) -> Path:
        """Return the path of the hostfile that the leader of a job watches."""
        return self._place.hostfiles / job.run_id

    def write_hostfile(self, job: Job, hosts: Iterable[Host]) -> None:
        """Replace the hostfile of a job by one with the slots that it holds.

        Raises:
            RunError: it cannot be written.
        """
        lines = [
            replace(
                host,
                slots=job.held[host.name],
                max_slots=max(host.slots, host.max_slots or 0),
                devices=self._devices.assign(job.run_id, host, job.held[host.name]),
            )
            for host in hosts
            if job.held.get(host.name)
        ]
        path = self.hostfile(job)
        try:
            write_hostfile(path, lines)
        except OSError as error:
            raise RunError(f"cannot write the hostfile {path}: {error.strerror}") from error


def _folder(job: Job) -> RunFolder:
    return RunFolder(runs_folder() / job.run_id)


class Devices:
    """The GPUs of the slots of all jobs, by host.

    The slots of a job on a host are a stack: it gives up the last one first, so the others keep
    their GPUs. A GPU that was given up is free once the process that used it is gone.
    """

    def __init__(self) -> None:
        self._of: dict[str, dict[str, tuple[int, ...]]] = {}

    def restore(self, job: str, hosts: Sequence[Host]) -> None:
        """Take over what an earlier daemon wrote into the hostfile of a job."""
        self._of[job] = {host.name: host.devices for host in hosts if host.devices}

    def forget(self, job: str) -> None:
        """Free the GPUs of a job whose run has ended."""
        self._of.pop(job, None)

    def release(self, job: str, held: Mapping[str, int], occupied: Mapping[str, int]) -> None:
        """Free the GPUs of slots that a job neither holds nor has a process in."""
        for host, devices in list(self._of.get(job, {}).items()):
            self._of[job][host] = devices[: max(held.get(host, 0), occupied.get(host, 0))]

    def assign(self, job: str, host: Host, slots: int) -> tuple[int, ...]:
        """Return the GPUs of a job's slots on a host, new ones for the slots that it lacks.

        Args:
            host: the host as in the cluster's hostfile; its ``devices`` are those that may be used.
        """
        own = self._of.setdefault(job, {}).get(host.name, ())
        taken = {
            device
            for name, hosts in self._of.items()
            if name != job
            for device in hosts.get(host.name, ())
        }
        others = [each for each in host.devices or range(host.slots) if each not in own]
        # Those of another job come last: only if its process there is about to end.
        free = sorted(others, key=taken.__contains__)
        kept = (*own, *free[: max(0, slots - len(own))])
        self._of[job][host.name] = kept
        return kept[:slots]
