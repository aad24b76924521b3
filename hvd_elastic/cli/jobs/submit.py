"""Implement ``hvd-elastic submit``: put jobs into the queue of a cluster."""

from __future__ import annotations

import getpass
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hvd_elastic.cli.jobs.daemon import ClusterOption, notify_held_s
from hvd_elastic.cli.options import (
    AsJson,
    command,
    number_option,
    option,
    parse_duration,
    whole_number_option,
)
from hvd_elastic.cli.runs.run_options import RunOptions
from hvd_elastic.errors import HostfileError, UsageError, raise_together

if TYPE_CHECKING:
    from hvd_elastic.jobs.job import After, JobRequest
    from hvd_elastic.jobs.place import ClusterFolder

_ARRAY = re.compile(r"(\d+)-(\d+)(?::(\d+))?|(\d+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,49}")
_NUMBERS = re.compile(r"\d+(-\d+)?")
_UNSUITABLE = re.compile(r"[^A-Za-z0-9._-]+|^[^A-Za-z0-9]+")
_MOST_JOBS = 100_000
_PRIVATE = "private"
"""Name of a job whose user hides its name."""


@dataclass(frozen=True)
class SubmitOptions(RunOptions):
    """Options of ``submit``: options of a run that choose no hosts, and options of a job."""

    np: Annotated[
        int | None, whole_number_option("number of slots of a --fixed job", "--np", "-n")
    ] = None
    min_np: Annotated[int, whole_number_option("fewest slots", "--min-np")] = 1
    max_np: Annotated[int | None, whole_number_option("most slots (default: all)", "--max-np")] = (
        None
    )
    name: Annotated[str | None, option("name of the job (default: of the script)", "--name")] = None
    priority: Annotated[
        float, number_option("weight relative to other jobs", "--priority", above=True)
    ] = 1.0
    fixed: Annotated[bool, option("keep to --np slots from start to end", "--fixed")] = False
    plain: Annotated[
        bool, option("any command: one process in one slot of one host", "--plain")
    ] = False
    deadline: Annotated[
        str | None, option("finish within, such as 6h or 90m", "--deadline", metavar="TIME")
    ] = None
    time: Annotated[
        str | None,
        option("end it, after a checkpoint, when it has run for, such as 8h", metavar="TIME"),
    ] = None
    epochs: Annotated[
        float | None, number_option("epochs that it will train", "--epochs", above=True)
    ] = None
    target_examples: Annotated[
        float | None,
        number_option(
            "useful examples that it will train, such as 5e7", "--target-examples", above=True
        ),
    ] = None
    after: Annotated[
        list[str] | None,
        option("wait for another job; may be repeated", "--after", metavar="ok|any|fail:JOB"),
    ] = None
    array: Annotated[
        str | None,
        option(
            "a job for each index; {index} in the command stands for it", "--array", metavar="0-9"
        ),
    ] = None
    retries: Annotated[
        int, whole_number_option("how often to try again if it fails", "--retries", least=0)
    ] = 0
    only_hosts: Annotated[
        str | None,
        option("hosts that it may have, such as gpu[1-4] or @LABEL", "--hosts", metavar="LIST"),
    ] = None
    exclude_hosts: Annotated[
        str | None,
        option(
            "hosts that it may not have, as --hosts",
            "--exclude",
            "--exclude-hosts",
            "-x",
            metavar="LIST",
        ),
    ] = None
    labels: Annotated[
        str | None,
        option("labels, or words of GPUs' names, that its hosts have", metavar="LABEL,…"),
    ] = None
    gpu_memory: Annotated[
        float | None,
        number_option("least memory of its GPUs", "--gpu-memory", above=True, metavar="GB"),
    ] = None
    notify: Annotated[
        str | None,
        option(
            "run for events of the job, with each as JSON on its input",
            "--notify",
            metavar="COMMAND",
        ),
    ] = None
    notify_held: Annotated[
        str | None,
        option(
            "also report when it has been held for, such as 30m", "--notify-held", metavar="TIME"
        ),
    ] = None
    private: Annotated[
        bool, option("hide its name and command from other users of the cluster", "--private")
    ] = False
    hold: Annotated[bool, option("do not start it before hvd-elastic release", "--hold")] = False
    cluster: ClusterOption = None
    as_json: AsJson = False

    @property
    def engine(self) -> None:
        """Return None: the daemon chooses the hosts, wherever this process runs."""
        return

    def check(self) -> None:
        """Check all options; see :meth:`RunOptions.check`."""
        raise_together(
            self._check_size, self._check_name, self._check_hosts, self._check_notify, super().check
        )

    def request(self, place: ClusterFolder) -> JobRequest:
        """Return what is asked of the daemon of a cluster."""
        from hvd_elastic.jobs.host_wish import HostWish
        from hvd_elastic.jobs.job import JobKind, JobRequest

        after: tuple[After, ...] = ()
        if self.after:
            from hvd_elastic.cli.jobs.queue import parse_after

            after = parse_after(self.after, place)
        deadline = self.deadline
        fixed_np = 1 if self.plain else self.np
        return JobRequest(
            name=_PRIVATE if self.private else self.name or _name_of(self.command or []),
            spec=asdict(self.spec()) | ({"notify": self.notify} if self.notify else {}),
            kind=JobKind("plain" if self.plain else "fixed" if self.fixed else "elastic"),
            min_np=fixed_np or self.min_np,
            max_np=fixed_np or self.max_np,
            priority=self.priority,
            deadline=None
            if deadline is None
            else time.time() + parse_duration("--deadline", deadline),
            epochs=self.epochs,
            target_examples=self.target_examples,
            after=after,
            retries=self.retries,
            hold=getpass.getuser() if self.hold else "",
            time_limit_s=None if self.time is None else parse_duration("--time", self.time),
            wish=HostWish(
                self.only_hosts or "",
                self.exclude_hosts or "",
                _parts_of(self.labels),
                self.gpu_memory,
            ),
            notify=self.notify is not None,
            notify_held_s=notify_held_s(self.notify, self.notify_held),
            private=self.private,
        )

    def _most_workers(self) -> int | None:
        return self.np or self.max_np

    def _check_size(self) -> None:
        fixed, plain, np = self.fixed, self.plain, self.np
        if fixed and plain:
            raise UsageError("--fixed is for a training script, --plain for any command: give one")
        if plain and (np or 1, self.min_np, self.max_np or 1) != (1, 1, 1):
            raise UsageError(
                "a --plain command is one process in one slot: leave --np, --min-np and --max-np "
                "out"
            )
        if fixed and (self.min_np != 1 or self.max_np is not None):
            raise UsageError("a --fixed job has one size: give --np, not --min-np or --max-np")
        if np is not None and not (fixed or plain):
            raise UsageError(
                "--np is the size of a --fixed job; an elastic one has --min-np and --max-np"
            )
        if fixed and np is None:
            raise UsageError("--fixed needs the number of slots: give --np")
        if plain and self.profile is not None:
            raise UsageError("--profile records steps of training, and a --plain command has none")
        if self.spares and (fixed or plain):
            raise UsageError(
                "spares are slots of an elastic job that do not train: leave --spares out, or "
                "--fixed and --plain"
            )

    def _check_hosts(self) -> None:
        from hvd_elastic.hosts.hostfile import expand_hosts

        for flag, text in (("--hosts", self.only_hosts), ("--exclude", self.exclude_hosts)):
            try:
                if text is not None:
                    expand_hosts(text, labels=True)
            except HostfileError as error:
                raise UsageError(f"{flag}: {error}") from None
        if self.labels is not None and not _parts_of(self.labels):
            raise UsageError("--labels is empty: give labels of the hostfile, such as a100")

    def _check_notify(self) -> None:
        notify_held_s(self.notify, self.notify_held)

    def _check_name(self) -> None:
        name = self.name
        if name is not None and self.private:
            raise UsageError(
                f"--private hides the name of a job, which is {_PRIVATE}-NUMBER then: leave --name "
                "out"
            )
        if name is not None and not _NAME.fullmatch(name):
            raise UsageError(
                f"--name {name!r} is not valid: it has 1 to 50 of the characters A-Z a-z 0-9 . _ - "
                "and starts with a letter or a digit"
            )
        if name is not None and _NUMBERS.fullmatch(name):
            raise UsageError(
                f"--name {name!r} is not valid: other commands would take it for numbers of jobs"
            )


OF_THE_CLUSTER = (
    *(
        "hostfile",
        "exclude",
        "inside",
        "cloud",
        "ssh_config",
        "mpi",
        "pin_hosts",
        "run_id",
        "resume",
        "detach",
    ),
    *("policy", "goal"),
)
"""Options of a run that choose its hosts, or what the daemon does for a job."""


@command(SubmitOptions, but=OF_THE_CLUSTER, pass_on=True)
def submit(options: SubmitOptions) -> None:
    """Put a job into the queue of a cluster. It runs as soon as there are slots for it.

    It has this shell's environment and folder. An elastic script starts with
    few slots and gets more as its gain by them is measured; [bold]--fixed[/bold] and
    [bold]--plain[/bold] are for others.

    Examples:
      hvd-elastic submit -- python train.py --lr 0.1

      hvd-elastic submit --name resnet --priority 2 --min-np 2 --epochs 90 -- python train.py

      hvd-elastic submit --array 0-9 -- python train.py --seed {index}

      hvd-elastic submit --plain --after ok:resnet -- python evaluate.py
    """
    from hvd_elastic.jobs.job import Submit
    from hvd_elastic.jobs.place import open_cluster
    from hvd_elastic.jobs.server import ask_daemon

    options.check()
    place = open_cluster(options.cluster)
    request = options.request(place)
    requests = [request] if options.array is None else _array(request, options.array)
    environment = dict(os.environ)
    if place.is_others:  # whose daemon is not to know it
        from hvd_elastic.jobs.secrets import JobSecrets

        secrets = JobSecrets(place)
        requests = [secrets.keep(each, environment) for each in requests]
        environment = {}
    answer = ask_daemon(place, Submit(requests, environment))
    if answer.needs_keeper:
        from hvd_elastic.cli.jobs.keeper import start_keeper

        start_keeper(place)
    if options.as_json:
        print(json.dumps({"jobs": answer.jobs, "run_ids": answer.data, "cluster": place.name}))
        return
    for run_id in answer.data:
        print(run_id)
    first = answer.jobs[0]
    print(f"{answer.message}: hvd-elastic queue, hvd-elastic why {first}", file=sys.stderr)


def _parts_of(text: str | None) -> tuple[str, ...]:
    parts = (each.strip().removeprefix("@") for each in (text or "").split(","))
    return (*dict.fromkeys(filter(None, parts)),)


def _name_of(command: Sequence[str]) -> str:
    """Return the name of a job without a name.

    >>> _name_of(["python", "-u", "train/resnet.py", "--lr", "1"]), _name_of(["sleep", "3"])
    ('resnet', 'sleep')
    """
    scripts = [word for word in command if word.endswith(".py")]
    stem = Path(scripts[0] if scripts else command[0]).stem
    return _UNSUITABLE.sub("-", stem).strip("-.")[:50] or "job"


def _array(request: JobRequest, text: str) -> list[JobRequest]:
    indices: list[int] = []
    for part in text.split(","):
        found = _ARRAY.fullmatch(part.strip())
        if found is None:
            raise UsageError(f"--array takes indices as in 0-9, 0-20:5 or 1,4,7, not '{text}'")
        first, last, step, single = found.groups()
        if single is not None:
            indices.append(int(single))
        else:
            if int(last) < int(first) or step == "0":
                raise UsageError(f"--array: the range '{part}' is empty")
            if int(last) - int(first) > _MOST_JOBS:
                raise UsageError(f"--array: '{part}' has more than {_MOST_JOBS:,} indices")
            indices += range(int(first), int(last) + 1, int(step or 1))
    found_jobs = []
    for index in dict.fromkeys(indices):
        words = [str(word).replace("{index}", str(index)) for word in request.spec["command"]]
        found_jobs.append(
            replace(request, spec={**request.spec, "command": words}, array_index=index)
        )
    return found_jobs
