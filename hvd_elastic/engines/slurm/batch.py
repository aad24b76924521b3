"""What ``hvd-elastic slurm submit`` hands to Slurm: batch scripts."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from hvd_elastic.engines.slurm.sbatch_options import SbatchOption, as_line, parse_options
from hvd_elastic.errors import RunError
from hvd_elastic.formatting import duration_words
from hvd_elastic.hosts.hostfile import expand_hosts

_TIME = re.compile(r"((?P<days>\d+)-)?(?P<rest>\d+(:\d+){0,2})")

_ONCE = ("--begin", "--dependency", "--hold")
_APART = (*_ONCE, "--nodelist", "--exclude")
"""Options that are not the same for all allocations of a run."""


def parse_time(text: str) -> float | None:
    """Return the seconds of a time as Slurm writes it; None if it is none, such as UNLIMITED.

    >>> [parse_time(text) for text in ("30", "1:30", "2:00:00", "1-12", "1-00:30", "UNLIMITED")]
    [1800.0, 90.0, 7200.0, 129600.0, 88200.0, None]
    """
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    parts = [int(part) for part in match["rest"].split(":")]
    if match["days"] is not None:  # days-hours[:minutes[:seconds]]
        units = (3600, 60, 1)
    else:  # minutes[:seconds], or hours:minutes:seconds
        units = (3600, 60, 1) if len(parts) == 3 else (60, 1, 0)
    seconds = sum(part * unit for part, unit in zip(parts, units, strict=False))
    return float(seconds + 86400 * int(match["days"] or 0))


def parse_left(text: str) -> float:
    """Return the time that squeue prints as left until a job's limit [s]; infinite if it has none.

    >>> parse_left("59:30"), parse_left("UNLIMITED"), parse_left("INVALID")
    (3570.0, inf, 0.0)
    """
    if text == "INVALID":  # the limit has passed
        return 0.0
    left_s = parse_time(text) if ":" in text else None
    return math.inf if left_s is None else left_s


@dataclass(frozen=True)
class Submission:
    """How a run is submitted to Slurm.

    Attributes:
        run_id: name of the run.
        least, most: fewest and most nodes. The first allocation has the fewest, each further one
            has a single node.
        slots_per_node: number of processes on each node.
        time: time limit of each allocation, as Slurm writes it; None: that of the partition.
        partition: None: the default one.
        leave_before_s: how long before its time limit an allocation is left [s].
        give_back_after_s: how long ``--policy goodput`` leaves a further node unused before it is
            given back [s].
        sbatch: further options for sbatch.
        folder: folder for the output of the batch scripts.
        cwd: folder in which they start.
        python: interpreter.
        home: HVD_ELASTIC_HOME of the run, which all nodes see.
    """

    run_id: str
    least: int
    most: int
    folder: str
    cwd: str
    python: str
    home: str
    slots_per_node: int = 1
    time: str | None = None
    partition: str | None = None
    leave_before_s: float = 120.0
    give_back_after_s: float = 120.0
    sbatch: tuple[str, ...] = ()

    @property
    def options(self) -> list[SbatchOption]:
        """Return the further options for sbatch."""
        return [option for text in self.sbatch for option in parse_options(text)]

    @property
    def once(self) -> list[str]:
        """Return those that are for the first submission alone, and so not in a script."""
        return [str(option) for option in self.options if option.name in _ONCE]

    @property
    def nodelist(self) -> list[str]:
        """Return the nodes that the run asks for by name before any other."""
        return [*expand_hosts(found[-1])] if (found := self._values("--nodelist")) else []

    @property
    def exclude(self) -> list[str]:
        """Return lists of the nodes that the run does not take."""
        return self._values("--exclude")

    def _values(self, name: str) -> list[str]:
        return [option.value for option in self.options if option.name == name]

    @property
    def job_name(self) -> str:
        """Name of the job in which the run is led."""
        return f"hvd-{self.run_id}"

    @property
    def further_name(self) -> str:
        """Name of the jobs that add a node."""
        return f"{self.job_name}+"

    def check_left(self, left_s: float) -> None:
        """Check that an allocation lasts long enough for anything to be trained in it.

        Raises:
            RunError: it does not, as where the limit of the partition is short; says what to give.
        """
        if left_s <= self.leave_before_s:
            raise RunError(
                f"this job ends in {duration_words(left_s)}, and the run leaves its nodes "
                f"{self.leave_before_s:g} s before that. Give more time, or a smaller "
                f"--leave-before: hvd-elastic slurm submit --resume {self.run_id} --time TIME"
            )

    def log_of(self, job_id: str) -> str:
        """Return where the output of a job goes."""
        return (self._values("--output") or [f"{self.folder}/slurm-{job_id}.log"])[-1]

    @property
    def first_script(self) -> Path:
        """Path of the script of the allocation in which the run is led."""
        return Path(self.folder, "first.sh")

    @property
    def further_script(self) -> Path:
        """Path of the script of an allocation that adds a node."""
        return Path(self.folder, "further.sh")

    def write_scripts(self) -> None:
        """Write both scripts.

        Raises:
            RunError: the folder cannot be written.
        """
        try:
            Path(self.folder).mkdir(exist_ok=True)
            self.first_script.write_text(self.first(), encoding="utf-8")
            self.further_script.write_text(self.further(), encoding="utf-8")
        except OSError as error:
            raise RunError(f"cannot write to {self.folder}: {error.strerror}") from error

    def first(self) -> str:
        """Return the batch script of the allocation in which the run is led."""
        leads = [self.python, "-m", "hvd_elastic.cli.app", "slurm", "lead", self.run_id]
        return self._script(
            self.job_name,
            [
                f"--nodes={self.least}",
                "--requeue",
                # Slurm sends it to this script alone, which by then is the leader.
                f"--signal=B:USR1@{math.ceil(self.leave_before_s)}",
                # The run goes on without a node that fails.
                "--no-kill",
                *([f"--nodelist={','.join(self.nodelist[: self.least])}"] if self.nodelist else []),
                *([f"--exclude={','.join(self.exclude)}"] if self.exclude else []),
            ],
            f"# Leads run {self.run_id}: begins it, or goes on with it.",
            "trap '' USR1  # which may come before the leader can take it\n"
            f"export HVD_ELASTIC_HOME={shlex.quote(self.home)}\nexec {shlex.join(leads)}\n",
        )

    def further(self) -> str:
        """Return the batch script of an allocation that adds a node."""
        return self._script(
            self.further_name,
            ["--nodes=1", "--no-requeue"],
            f"# Adds a node to run {self.run_id}. Its leader starts by srun what runs here, and\n"
            "# cancels this job; without a leader, it ends itself.",
            _HOLD.format(name=self.job_name, script=shlex.quote(str(self.first_script))),
        )

    def _script(self, name: str, options: list[str], what: str, body: str) -> str:
        lines = [f"--job-name={name}", *options, f"--ntasks-per-node={self.slots_per_node}"]
        lines += [f"--time={self.time}"] if self.time else []
        lines += [f"--partition={self.partition}"] if self.partition else []
        lines += [
            "--open-mode=append",
            f"--output={self.folder.replace('%', '%%')}/slurm-%j.log",
            f"--chdir={self.cwd}",
            *(str(option) for option in self.options if option.name not in _APART),
        ]
        head = "".join(f"{as_line(line)}\n" for line in lines)
        return f"#!/bin/bash\n{head}\n{what}\n{body}"


_HOLD = """\
unset ${{!SQUEUE_@}}  # which are options of squeue
leader={script}
alone=0
while [ $alone -lt 3 ]; do
    sleep 30 &
    wait $!
    if jobs=$(squeue --noheader --me --states=RUNNING --name={name} --format=%o); then
        if grep -Fqx -- "$leader" <<<"$jobs"; then alone=0; else alone=$((alone + 1)); fi
    fi
done
"""
"""Waits until the leader's job has not run for more than a minute; a slurmctld that does not answer
says nothing about it."""
