"""Finds a run that is to be resumed, and what it is led with.

If the leader's machine and disk are lost, the specification of the run comes from its hosts: each
agent keeps it in the spool of its host (:mod:`hvd_elastic.agent.spool`).
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvd_elastic.agent.spool import SPEC_NAME
from hvd_elastic.config import runs_folder
from hvd_elastic.errors import RunError, UsageError, raise_together
from hvd_elastic.formatting import count
from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.fanout import Stopper, fan_out
from hvd_elastic.hosts.hostfile import Host, Hostfile, parse_hostfile
from hvd_elastic.hosts.ssh import connect
from hvd_elastic.hosts.ssh_config import ssh_config_for
from hvd_elastic.json_text import parse_json
from hvd_elastic.leader.hostfile_watch import read_hosts
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import summarize
from hvd_elastic.records.tensorboard import check_tensorboard

WHAT_IS_TRUSTED = (
    *("command", "cwd", "python", "preemption_command", "checkpoint_folder", "interface"),
    "input_hosts",
)
"""Fields that decide which programs run, on which further hosts, and where files go; all hosts have
to agree on them, so that one manipulated host cannot change them unnoticed."""

_LIMIT_S = 30.0
"""Time limit for reading the small files on one host [s]; a slower host counts as unreachable."""


@dataclass(frozen=True)
class Resumption:
    """A run that is to be resumed, and what the user wants otherwise from now on.

    Attributes:
        hostfile: its hostfile from now on; None: that of before, or what its engine gives.
        ssh_config: ssh configuration; None: that of before.
        np, max_np: its sizes; None: as before.
        command: words that the user has given as a command, of which there must be none.
    """

    run_id: str
    hostfile: Path | None = None
    ssh_config: Path | None = None
    np: int | None = None
    max_np: int | None = None
    command: Sequence[str] = ()

    @property
    def _config(self) -> str | None:
        return ssh_config_for(self.hostfile, self.ssh_config)

    def find_folder(self, tell: Callable[[str], None]) -> RunFolder:
        """Return the run's folder, created from its hosts' records if another machine led the run.

        Args:
            tell: called with lines on what the hosts say of the run.

        Raises:
            RunError: there is no such run, it has finished, or its hosts do not agree on it.
        """
        if (folder := RunFolder.find(self.run_id)) is not None:
            check_not_complete(folder)
            return folder
        if self.hostfile is None:
            try:
                return RunFolder.open(self.run_id)
            except RunError as error:
                raise RunError(
                    f"{error}\nIf another machine led it, which is gone, its hosts know it: "
                    f"hvd-elastic run --resume {self.run_id} --hostfile HOSTFILE"
                ) from error
        config = self._config
        ssh = SshOptions(config_path=None if config is None else Path(config))
        spec = find_run(self.run_id, list(parse_hostfile(self.hostfile)), ssh)
        tell(f"run {self.run_id} was led by another machine. What its hosts say of it:")
        for name in WHAT_IS_TRUSTED:
            value = getattr(spec, name)
            if value:
                # Quoted as in Python, since a host may send escape sequences for the terminal.
                tell(f"  {name}: {list(value) if name == 'command' else value!r}")
        _check_folder_is_here(spec, self.run_id)
        # The hosts' values of these two are paths on the other machine.
        spec = replace(spec, hostfile=str(self.hostfile.absolute()), ssh_config=config)
        return RunFolder.create(self.run_id, {**spec.as_dict(), "began_elsewhere": True})

    def spec_of(
        self, folder: RunFolder, inside: Sequence[str], given: Callable[[], Hostfile | None]
    ) -> RunSpec:
        """Return the specification that the run is resumed with.

        Args:
            inside: engines that give hosts to a run that is started inside of them.
            given: returns the hosts that such an engine gives to this process.

        Raises:
            HvdElasticError: it cannot be resumed like that; says why.
        """
        if self.command:
            raise UsageError(
                f"--resume {self.run_id} runs the command it was started with; leave it out"
            )
        spec = RunSpec.from_dict(folder.read_run(), self.run_id)
        if spec.engine is not None and spec.engine.partition(":")[0] not in inside:
            raise RunError(
                f"run {self.run_id} was led by a program on {spec.engine}, which alone can give it "
                "hosts: run that program again"
            )
        np, hostfile = self.np, self.hostfile
        changes: dict[str, Any] = {"ssh_config": self._config or spec.ssh_config}
        if np is not None:
            changes |= {"np": np, "slots": max(np, spec.slots)}
        if self.max_np is not None:
            changes["max_np"] = self.max_np
        if hostfile is not None:
            changes |= {"hostfile": str(hostfile.absolute()), "engine": None}
        spec = replace(spec, **changes)
        # Only the sizes given now have to fit the hostfile: it may have been edited since the run
        # began, and hosts may still be added.
        asked = None
        if np is not None or hostfile is not None:
            path = spec.hostfile_path
            asked = given() if path is None or spec.engine else read_hosts(path, 1, spec.exclude)
        spares = 0 if np is None else spec.spares
        raise_together(
            lambda: check_sizes(spec.np, spec.min_np, spec.max_np, mpi=False),
            lambda: check_slots(asked, np, spec.min_np, spares),
        )
        if spec.tensorboard:
            check_tensorboard("--tensorboard")
        _check_folder_is_here(spec, self.run_id)
        return spec


def _check_folder_is_here(spec: RunSpec, run_id: str) -> None:
    if not Path(spec.cwd).is_dir():
        raise RunError(
            f"run {run_id} was started in the folder {spec.cwd!r}, which is not on this machine"
        )


def check_not_complete(folder: RunFolder) -> None:
    """Raise RunError if the run has finished."""
    if summarize(folder.iter_events()).status == "succeeded":
        raise RunError(
            f"run {folder.run_id} has finished: there is nothing to resume. Look at it with: "
            f"hvd-elastic report {folder.run_id}"
        )


def check_slots(hosts: Hostfile | None, np: int | None, min_np: int, spares: int) -> None:
    """Raise UsageError if the hosts have too few slots."""
    if hosts is None:
        return
    slots = hosts.slots
    wanted = max(min_np, np or 0)
    if wanted <= slots < wanted + spares:
        raise UsageError(
            f"--spares {spares} beside {count(wanted, 'worker')} needs "
            f"{count(wanted + spares, 'slot')}, and {hosts.source} has {slots}. Lower one of "
            "them, or add hosts or slots."
        )
    if wanted > slots:
        flag = "--np" if np == wanted else "--min-np"
        raise UsageError(
            f"{flag} {wanted} is above the {count(slots, 'slot')} of {hosts.source}. Lower it, "
            "or add hosts or slots."
        )


def check_sizes(np: int | None, min_np: int, max_np: int | None, *, mpi: bool) -> None:
    """Raise UsageError if sizes contradict each other."""
    if mpi and (min_np != 1 or max_np is not None):
        raise UsageError(
            "a job under --mpi has a fixed size: leave --min-np and --max-np out, give --np"
        )
    for wider, narrower, names in (
        (max_np, min_np, "--min-np {1} is above --max-np {0}"),
        (np, min_np, "--min-np {1} is above --np {0}"),
        (max_np, np, "--np {1} is above --max-np {0}"),
    ):
        if wider is not None and narrower is not None and narrower > wider:
            raise UsageError(names.format(wider, narrower))


def find_run(run_id: str, hosts: Sequence[Host], options: SshOptions) -> RunSpec:
    """Return the specification of a run that its hosts have kept.

    Args:
        run_id: valid name of a run.
        hosts: hosts of the run's hostfile.

    Raises:
        RunError: no host knows the run, or hosts disagree on a field of ``WHAT_IS_TRUSTED``.
    """
    home = os.environ.get("HVD_ELASTIC_HOME")
    folder = '"$HOME"/.hvd_elastic' if home is None else shlex.quote(home)
    command = f"cat {folder}/spool/{shlex.quote(run_id)}/*/{SPEC_NAME} 2>/dev/null || true"

    def read(host: Host, stopper: Stopper) -> list[bytes]:
        with connect(host, options) as connection:
            stopper.add_action(connection.close)
            return connection.run(command, _LIMIT_S).stdout.splitlines()

    failed: list[str] = []
    found: list[tuple[str, RunSpec]] = []
    for result in fan_out(hosts, read, timeout_s=options.connect_timeout_s + _LIMIT_S):
        if result.ok:
            found += [(result.host.name, spec) for spec in _specs(result.answer, run_id)]
        else:
            failed.append(result.error)
    if not found:
        asked = f"none of its {len(hosts)} hosts knows it"
        if failed:
            asked = f"{len(failed)} of {len(hosts)} hosts could not be asked ({failed[0]})"
        raise RunError(
            f"there is no run {run_id!r} on this machine, as far as {runs_folder()} tells (runs of "
            f"another HVD_ELASTIC_HOME are not seen), and {asked}. A host forgets a run that "
            "has ended, unless it holds a checkpoint that no leader has fetched"
        )
    (first, spec), *others = found
    for name, other in others:
        for field in WHAT_IS_TRUSTED:
            if getattr(other, field) != getattr(spec, field):
                raise RunError(
                    f"the hosts of run {run_id} do not agree on its {field}: {first} says "
                    f"{getattr(spec, field)!r}, {name} says {getattr(other, field)!r}. Leave out "
                    "of the hostfile whom you do not trust, or who has it from an older run"
                )
    return spec


def _specs(texts: Iterable[bytes], run_id: str) -> Iterator[RunSpec]:
    """Yield the valid specifications of this run among the lines."""
    for text in texts:
        with contextlib.suppress(ValueError, RunError):
            fields = parse_json(text)
            if isinstance(fields, dict) and fields.get("run_id") == run_id:
                yield RunSpec.from_dict(fields, run_id)
