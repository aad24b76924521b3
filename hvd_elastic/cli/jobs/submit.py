"""Implement ``hvd-elastic submit``: put jobs into the queue of a cluster."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hvd_elastic.cli.jobs.daemon import ClusterOption
from hvd_elastic.cli.jobs.queue import parse_after
from hvd_elastic.cli.numbers import number_option, parse_duration, whole_number_option
from hvd_elastic.cli.runs.run_options import RunOptions
from hvd_elastic.cli.shared_options import AsJson
from hvd_elastic.errors import UsageError

if TYPE_CHECKING:
    from hvd_elastic.jobs.job import JobRequest

_ARRAY = re.compile(r"(\d+)-(\d+)(?::(\d+))?|(\d+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,49}")
_NUMBERS = re.compile(r"\d+(-\d+)?")
_UNSUITABLE = re.compile(r"[^A-Za-z0-9._-]+|^[^A-Za-z0-9]+")
_MOST_JOBS = 100_000
_SHOWN = 10
"""Run ids that are printed, of an array."""


def submit(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="the training command, after --", metavar="-- COMMAND [ARG]..."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="name of the job (default: of the script)")
    ] = None,
    priority: Annotated[
        float, number_option("--priority", above=True, help="weight relative to other jobs")
    ] = 1.0,
    np: Annotated[
        int | None, whole_number_option("--np", "-n", help="number of slots of a --fixed job")
    ] = None,
    min_np: Annotated[int, whole_number_option("--min-np", help="fewest slots")] = 1,
    max_np: Annotated[
        int | None, whole_number_option("--max-np", help="most slots (default: all)")
    ] = None,
    fixed: Annotated[
        bool, typer.Option("--fixed", help="keep to --np slots from start to end")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="any command: one process in one slot of one host")
    ] = False,
    deadline: Annotated[
        str | None,
        typer.Option("--deadline", metavar="TIME", help="finish within, such as 6h or 90m"),
    ] = None,
    epochs: Annotated[
        float | None, number_option("--epochs", above=True, help="epochs that it will train")
    ] = None,
    target_examples: Annotated[
        float | None,
        number_option(
            "--target-examples", above=True, help="useful examples that it will train, such as 5e7"
        ),
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            "--after", metavar="ok|any|fail:JOB", help="wait for another job; may be repeated"
        ),
    ] = None,
    array: Annotated[
        str | None,
        typer.Option(
            "--array",
            metavar="0-9",
            help="a job for each index; {index} in the command stands for it",
        ),
    ] = None,
    retries: Annotated[
        int, whole_number_option("--retries", least=0, help="how often to try again if it fails")
    ] = 0,
    checkpoint_every_s: Annotated[
        float, number_option("--checkpoint-every", help="seconds between checkpoints, 0 for none")
    ] = 30.0,
    checkpoint_folder: Annotated[
        str | None,
        typer.Option("--checkpoint-dir", metavar="DIR|URL", help="folder or URL for checkpoints"),
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="Python on every host (default: this one's path)")
    ] = None,
    failure_timeout_s: Annotated[
        float,
        number_option(
            "--failure-timeout", above=True, help="seconds of silence after which a host is lost"
        ),
    ] = 5.0,
    audit: Annotated[
        bool, typer.Option("--audit", help="record which examples were really read")
    ] = False,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Put a job into the queue of a cluster. It runs as soon as there are slots for it.

    Its environment is that of this shell, and its folder this folder. An elastic script starts with
    few slots and gets more as its gain by them is measured; [bold]--fixed[/bold] and
    [bold]--plain[/bold] are for others.

    Examples:
      hvd-elastic submit -- python train.py --lr 0.1

      hvd-elastic submit --name resnet --priority 2 --min-np 2 --epochs 90 -- python train.py

      hvd-elastic submit --array 0-9 -- python train.py --seed {index}

      hvd-elastic submit --plain --after ok:resnet -- python evaluate.py
    """
    from hvd_elastic.jobs.messages import Submit
    from hvd_elastic.jobs.place import open_cluster
    from hvd_elastic.jobs.server import ask_daemon

    least, most = _bounds(np, min_np, max_np, fixed=fixed, plain=plain)
    options = RunOptions(
        command=command,
        checkpoint_every_s=checkpoint_every_s,
        checkpoint_folder=checkpoint_folder,
        python=python,
        failure_timeout_s=failure_timeout_s,
        audit=audit,
        min_np=least,
        max_np=most,
    )
    options.check()
    if name is not None and not _NAME.fullmatch(name):
        raise UsageError(
            f"--name {name!r} is not valid: it has 1 to 50 of the characters A-Z a-z 0-9 . _ - and "
            "starts with a letter or a digit"
        )
    if name is not None and _NUMBERS.fullmatch(name):
        raise UsageError(
            f"--name {name!r} is not valid: other commands would take it for numbers of jobs"
        )
    place = open_cluster(cluster)
    request = _request(
        options,
        name or _name_of(command or []),
        kind="plain" if plain else "fixed" if fixed else "elastic",
        priority=priority,
        deadline=None if deadline is None else time.time() + parse_duration("--deadline", deadline),
        epochs=epochs,
        target_examples=target_examples,
        after=parse_after(after or [], place),
        retries=retries,
    )
    requests = [request] if array is None else _array(request, array)
    answer = ask_daemon(place, Submit(requests, dict(os.environ)))
    if as_json:
        print(json.dumps({"jobs": answer.jobs, "run_ids": answer.data, "cluster": place.name}))
        return
    for run_id in answer.data[:_SHOWN]:
        print(run_id)
    first = answer.jobs[0]
    print(f"{answer.message}: hvd-elastic queue, hvd-elastic why {first}", file=sys.stderr)


def _bounds(
    np: int | None, min_np: int, max_np: int | None, *, fixed: bool, plain: bool
) -> tuple[int, int | None]:
    if fixed and plain:
        raise UsageError("--fixed is for a training script, --plain for any command: give one")
    if plain and (np or 1, min_np, max_np or 1) != (1, 1, 1):
        raise UsageError(
            "a --plain command is one process in one slot: leave --np, --min-np and --max-np out"
        )
    if fixed and (min_np != 1 or max_np is not None):
        raise UsageError("a --fixed job has one size: give --np, not --min-np or --max-np")
    if np is not None and not (fixed or plain):
        raise UsageError(
            "--np is the size of a --fixed job; an elastic one has --min-np and --max-np"
        )
    if fixed and np is None:
        raise UsageError("--fixed needs the number of slots: give --np")
    if plain:
        return 1, 1
    return (np, np) if fixed and np is not None else (min_np, max_np)


def _request(options: RunOptions, name: str, *, kind: str, **more: Any) -> JobRequest:
    from hvd_elastic.jobs.job import JobKind, JobRequest

    fields = asdict(options.spec())
    return JobRequest(
        name=name,
        spec=fields,
        kind=JobKind(kind),
        min_np=options.min_np,
        max_np=options.max_np,
        **more,
    )


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
