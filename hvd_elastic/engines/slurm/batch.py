"""Batch scripts that ``hvd-elastic slurm submit`` hands to Slurm, and the options of sbatch."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import duration_words
from hvd_elastic.hosts.hostfile import expand_hosts

_LONG = dict(
    re.findall(
        r"(\w)=(\S+)",
        "A=account a=array b=begin C=constraint c=cpus-per-task D=chdir d=dependency e=error "
        "F=nodefile G=gpus H=hold h=help J=job-name N=nodes n=ntasks o=output p=partition q=qos "
        "t=time V=version W=wait w=nodelist x=exclude",
    )
)
"""Long names of options by their letters."""
_FLAGS = frozenset("HIOQVWhksv")
"""Letters of options without a value, behind which other options may follow in the same word."""
_SHORTENED = (
    *("--array", "--chdir", "--dependency", "--exclude", "--gpus", "--hold", "--job-name"),
    *("--nodefile", "--nodelist", "--nodes", "--ntasks", "--ntasks-per-node", "--output"),
    *("--partition", "--signal", "--test-only", "--time", "--version", "--wait", "--begin"),
)
"""Options that this package looks at, of which sbatch takes any first part that is clear."""
_FREE_TEXT = ("--comment", "--wckey", "--mail-user", "--export")
VARIABLES = {
    "SBATCH_MEM_PER_NODE": "--mem",
    "SBATCH_TIMELIMIT": "--time",
    **{
        f"SBATCH_{name.upper().replace('-', '_')}": f"--{name}"
        for name in (
            *("account", "constraint", "cpus-per-gpu", "exclusive", "gpus", "gpus-per-node"),
            *("gpus-per-task", "gres", "mem-per-cpu", "mem-per-gpu", "partition", "qos"),
            *("reservation", "wckey"),
        )
    },
}
"""Variables that say what sbatch is to ask for; others, such as of the job's name, are ours."""


@dataclass(frozen=True)
class SbatchOption:
    """An option of sbatch.

    Attributes:
        name: its long name where this package knows it.
        value: its value; empty: it has none.
    """

    name: str
    value: str = ""

    def __str__(self) -> str:
        """Return the option as one word.

        >>> [str(SbatchOption(*each)) for each in (("--account", "a"), ("-L", "b"), ("-k",))]
        ['--account=a', '-Lb', '-k']
        """
        between = "=" if self.value and self.name.startswith("--") else ""
        return f"{self.name}{between}{self.value}"


def parse_options(text: str) -> Iterator[SbatchOption]:
    """Yield the options in one word of a command line, which may be several one-letter ones.

    Raises:
        UsageError: it is no option, or several that blanks separate.

    >>> texts = ("-N4", "-Ha1-3", "--exclude a,b", "--arr=2")
    >>> [str(each) for text in texts for each in parse_options(text)]
    ['--nodes=4', '--hold', '--array=1-3', '--exclude=a,b', '--array=2']
    """
    match = re.fullmatch(r"-[A-Za-z].*|(--[A-Za-z][\w-]*)(?:(?:=|\s+)(.*))?", text)
    if match is None:
        raise UsageError(
            f"--sbatch {text!r} is no option of sbatch: write it as one word, such as "
            "--sbatch=--account=vision"
        )
    if name := match[1]:
        value = match[2] or ""
        if name not in _SHORTENED:
            name = next((each for each in _SHORTENED if each.startswith(name)), name)
        yield _one(text, name, value)
        return
    rest = text[1:]
    while rest:
        letter, rest = rest[0], rest[1:]
        name = f"--{_LONG[letter]}" if letter in _LONG else f"-{letter}"
        if letter in _FLAGS:
            yield SbatchOption(name)
        else:
            yield _one(text, name, rest.strip())
            return


def _one(text: str, name: str, value: str) -> SbatchOption:
    if name not in _FREE_TEXT and re.search(r"\s--?[A-Za-z]", value):
        raise UsageError(
            f"--sbatch {text!r} has several options: give each one by a --sbatch of its own"
        )
    return SbatchOption(name, value)


def options_in(environment: Mapping[str, str]) -> list[SbatchOption]:
    """Return what the variables of sbatch in an environment ask for.

    >>> [str(each) for each in options_in({"SBATCH_QOS": "high", "SBATCH_JOB_NAME": "x"})]
    ['--qos=high']
    """
    return [
        SbatchOption(name, environment[variable])
        for variable, name in VARIABLES.items()
        if variable in environment
    ]


def as_line(option: str) -> str:
    r"""Return a ``#SBATCH`` line with one option, in which blanks and ``#`` would end it.

    >>> as_line('--comment=a "b" #c'), as_line("-La b")
    ('#SBATCH --comment="a \\"b\\" #c"', '#SBATCH -L"a b"')
    """
    cut = option.find("=") + 1 if option.startswith("--") else 2
    name, value = option[:cut], option[cut:]
    if re.search(r"""[\s"'\\#]""", value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH {name}{value}"


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
    """A run to submit to Slurm.

    Attributes:
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
                # The run continues without a node that fails.
                "--no-kill",
                *([f"--nodelist={','.join(self.nodelist[: self.least])}"] if self.nodelist else []),
                *([f"--exclude={','.join(self.exclude)}"] if self.exclude else []),
            ],
            f"# Leads run {self.run_id}: begins or resumes it.",
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
