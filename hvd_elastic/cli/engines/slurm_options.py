"""The options of ``hvd-elastic slurm submit``, and what they must be."""

from __future__ import annotations

import functools
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hvd_elastic.cli.options import AsJson, number_option, option, whole_number_option
from hvd_elastic.cli.runs.run_options import RunOptions
from hvd_elastic.config import home, runs_folder
from hvd_elastic.engines.growth import START_S
from hvd_elastic.engines.slurm.batch import (
    VARIABLES,
    SbatchOption,
    Submission,
    options_in,
    parse_time,
)
from hvd_elastic.errors import HostfileError, UsageError
from hvd_elastic.hosts.hostfile import Host, Hostfile

_NODES = re.compile(r"(?P<least>\d+)(-(?P<most>\d+))?")
_OF_OURS = {
    "--nodes": "--nodes",
    "--time": "--time",
    "--partition": "--partition",
    **dict.fromkeys(("--ntasks-per-node", "--ntasks"), "--slots-per-node"),
    "--signal": "--leave-before",
    "--job-name": "--run-id",
    "--chdir": "the folder in which the command is called",
    "--test-only": "--dry-run",
}
"""Options of sbatch that are set from options of ours."""
_NO_OPTION = ("--help", "--version", "--usage")
_OF_OTHERS = {
    "--wrap": "submits a command in place of the run: write it behind --",
    "--uid": "submits as another user, who has another home: be that user",
    "--gid": "submits as another group: use newgrp",
}
_LONGEST_NOTICE_S = 65535
"""Longest time before its limit at which Slurm signals a job [s]; at 0 it does not."""
_UNLIMITED = ("UNLIMITED", "INFINITE", "-1")


@dataclass(frozen=True)
class SubmitOptions(RunOptions):
    """The options of ``slurm submit``: those of a run, and those of its allocations."""

    nodes: Annotated[
        str | None, option("fewest and most nodes, such as 2-8", "--nodes", "-N", metavar="N[-M]")
    ] = None
    slots_per_node: Annotated[
        int, whole_number_option("workers on each node", "--slots-per-node")
    ] = 1
    time: Annotated[
        str | None,
        option("time limit of each allocation, as for sbatch", "--time", "-t", metavar="TIME"),
    ] = None
    partition: Annotated[str | None, option("partition of the nodes", "--partition", "-p")] = None
    sbatch: Annotated[
        list[str] | None,
        option(
            "further option for sbatch, such as --account=vision; may be repeated", metavar="OPTION"
        ),
    ] = None
    leave_before_s: Annotated[
        float,
        number_option("seconds before its time limit that an allocation is left", "--leave-before"),
    ] = 120.0
    give_back_after_s: Annotated[
        float,
        number_option(
            "seconds after which a further node that --policy goodput leaves unused is given back",
            "--give-back-after",
        ),
    ] = 120.0
    resume: Annotated[
        str | None, option("submit a stopped run again, which resumes", metavar="RUN")
    ] = None
    dry_run: Annotated[bool, option("print the batch scripts, and submit nothing", "--dry-run")] = (
        False
    )
    as_json: AsJson = False

    @property
    def engine(self) -> str:
        return "slurm"

    @functools.cached_property
    def given(self) -> Hostfile:
        """Return the most nodes that the run may get, under names of no meaning."""
        if self.nodes is None:
            raise UsageError("say how many nodes the run may have: --nodes 2-8")
        _, most = parse_nodes(self.nodes)
        hosts = [Host(f"node{n}", slots=self.slots_per_node) for n in range(1, most + 1)]
        return Hostfile(tuple(hosts), f"--nodes {self.nodes}")

    def submission(self, run_id: str) -> Submission:
        """Return what is submitted.

        Raises:
            UsageError: an option is not valid.
        """
        least, most = parse_nodes(self.nodes or "")
        asked = {each.name: each for each in options_in(os.environ)}
        time, partition = asked.pop("--time", None), asked.pop("--partition", None)
        found = Submission(
            run_id=run_id,
            least=least,
            most=most,
            folder=str(runs_folder().absolute() / run_id / "slurm"),
            cwd=str(Path.cwd()),
            python=sys.executable,
            home=str(home().absolute()),
            slots_per_node=self.slots_per_node,
            time=self.time or (time.value if time else None),
            partition=self.partition or (partition.value if partition else None),
            leave_before_s=self.leave_before_s,
            give_back_after_s=self.give_back_after_s,
            sbatch=(*map(str, asked.values()), *(self.sbatch or ())),  # the last one counts
        )
        known = {name: variable for variable, name in VARIABLES.items()}
        said = {str(each): f"{known[name]}={each.value}" for name, each in asked.items()}
        if time and not self.time:
            said["--time"] = f"SBATCH_TIMELIMIT={time.value}"
        check_submission(found, said)
        return found


NOT_HERE = (
    "hostfile",
    "exclude",
    "inside",
    "cloud",
    "detach",
    "ssh_config",
    "mpi",
    "pin_hosts",
    "input_hosts",
)
"""Options of a run that say where its hosts come from, or name hosts that nobody knows yet."""


OF_ALLOCATIONS = (
    *("nodes", "slots_per_node", "time", "partition", "sbatch"),
    *("leave_before_s", "give_back_after_s"),
)
"""Options that a run may be given anew when it is submitted again."""


def parse_nodes(text: str, name: str = "--nodes") -> tuple[int, int]:
    """Return the fewest and the most nodes.

    Args:
        name: name of the option, which also says what is counted.

    Raises:
        UsageError: the text is not valid; says what is.

    >>> parse_nodes("2-8"), parse_nodes("4")
    ((2, 8), (4, 4))
    """
    match = _NODES.fullmatch(text)
    if match is None:
        words = f"{name} takes a number of {name.strip('-')} or a range such as 2-8"
        raise UsageError(f"{words}, not '{text}'")
    least, most = int(match["least"]), int(match["most"] or match["least"])
    if least < 1:
        raise UsageError(f"{name} {text}: a run needs at least 1 {name.strip('-')[:-1]}")
    if most < least:
        raise UsageError(
            f"{name} {text}: the most {name.strip('-')} come second, and {most} is below {least}. "
            f"Did you mean {name} {most}-{least}?"
        )
    return least, most


def check_submission(asked: Submission, said: Mapping[str, str] | None = None) -> None:
    """Check what is asked of Slurm.

    Args:
        said: what the user has written for an option of sbatch, if not ``--sbatch`` or ``--time``.

    Raises:
        UsageError: an option is not valid; says what is.
    """
    said = said or {}
    for each in asked.options:
        _check_option(each, asked, said.get(str(each), f"--sbatch {each}"))
    if not 1 <= math.ceil(asked.leave_before_s) <= _LONGEST_NOTICE_S:
        raise UsageError(
            f"--leave-before {asked.leave_before_s:g}: Slurm announces a time limit 1 to "
            f"{_LONGEST_NOTICE_S} s before it; give as long as a last checkpoint takes, and more"
        )
    for text in (asked.folder, asked.cwd):
        if "\n" in text:
            raise UsageError(f"{text!r} has a line break, which a script for sbatch cannot have")
    if "\\" in asked.folder:
        raise UsageError(
            f"Slurm cannot write its log to {asked.folder}, because of the backslash. Set "
            "HVD_ELASTIC_HOME to a folder without one"
        )
    if asked.time is None or asked.time.upper() in _UNLIMITED:
        return
    time = said.get("--time", f"--time {asked.time}")
    limit_s = parse_time(asked.time)
    if limit_s is None:
        raise UsageError(
            f"{time} is no time of Slurm: give minutes, hours:minutes:seconds or "
            "days-hours:minutes, or UNLIMITED if the partition has no limit"
        )
    least_s = asked.leave_before_s + START_S
    if limit_s < least_s:
        raise UsageError(
            f"{time} leaves no time to train: the run leaves its nodes "
            f"{asked.leave_before_s:g} s before the limit (--leave-before), and workers need "
            f"about {START_S:g} s to start. Give at least {math.ceil(least_s / 60)} minutes"
        )


def _check_option(option: SbatchOption, asked: Submission, said: str) -> None:
    name = option.name
    if name == "--array":
        raise UsageError(
            f"{said}: each task of an array would lead the same run. Submit one run for each, "
            "with --run-id"
        )
    if name in _OF_OURS:
        raise UsageError(f"{said}: this is set by {_OF_OURS[name]}; use that")
    if name == "--wait":
        raise UsageError(
            f"{said} would wait for the end of one job, and a run continues in others: look at it "
            "with hvd-elastic status"
        )
    if name in _OF_OTHERS:
        raise UsageError(f"{said} {_OF_OTHERS[name]}")
    if name in _NO_OPTION:
        raise UsageError(f"{said} submits nothing: call sbatch itself for that")
    if name == "--nodefile" or (name in ("--nodelist", "--exclude") and "/" in option.value):
        raise UsageError(
            f"{said} names a file: write the nodes themselves, such as --sbatch=--nodelist=gpu[1-4]"
        )
    if name == "--gpus" and asked.most > 1:
        raise UsageError(
            f"{said} is a number for an allocation, and those of a run have different numbers of "
            "nodes. Say how many each node has: --sbatch=--gpus-per-node=4"
        )
    if name == "--nodelist":
        try:
            nodes = asked.nodelist
        except HostfileError as error:
            raise UsageError(f"{said}: {error}") from error
        if len(nodes) > asked.most:
            raise UsageError(
                f"{said} names {len(nodes)} nodes, and Slurm gives all of those: the run may have "
                f"at most {asked.most} (--nodes)"
            )
