"""A run whose leader's machine is gone, disk and all, found again on the hosts that it ran on.

Each agent keeps what the run was asked to be in the spool of its host, beside the shards of
checkpoints. From there another machine gets it, and resumes the run as if it had led it before.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_elastic.errors import RunError
from hvd_elastic.leader.spec import RunSpec

if TYPE_CHECKING:
    from hvd_elastic.hosts.connection import SshOptions
    from hvd_elastic.hosts.hostfile import Host

__all__ = ["WHAT_IS_TRUSTED", "find_run", "keep_run"]

WHAT_IS_TRUSTED = (
    *("command", "cwd", "python", "preemption_command", "checkpoint_folder", "interface"),
)
"""What decides which programs run and where files go; a host that lies about it must stand out."""

_NAME = "run.json"
_LIMIT_S = 30.0


def keep_run(spool: Path, fields: Mapping[str, Any]) -> None:
    """Leave what the run was asked to be in the spool of a host, in one line."""
    path = spool / f"{_NAME}.part"
    with contextlib.suppress(OSError):  # a full disk; other hosts have it, too
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(dict(fields)) + "\n")
        path.replace(spool / _NAME)


def find_run(run_id: str, hosts: Sequence[Host], options: SshOptions) -> RunSpec:
    """What a run was asked to be, as its hosts know it.

    Args:
        run_id: a valid one.
        hosts: of its hostfile.
        options: how to reach them.

    Raises:
        RunError: no host knows the run, or they do not agree on what is started where; names them.
    """
    # Every agent loads this module for keep_run, and starts sooner without these.
    from hvd_elastic.cluster.run.commands import CommandSettings, run_on_hosts

    home = os.environ.get("HVD_ELASTIC_HOME")
    folder = '"$HOME"/.hvd_elastic' if home is None else shlex.quote(home)
    command = f"cat {folder}/spool/{shlex.quote(run_id)}/*/{_NAME} 2>/dev/null || true"
    failed: list[str] = []
    found: list[tuple[str, RunSpec]] = []
    for result in run_on_hosts(hosts, command, options, CommandSettings(timeout_s=_LIMIT_S)):
        if result.ok:
            texts = result.answer.stdout.splitlines()
            found += [(result.host.name, spec) for spec in _specs(texts, run_id)]
        else:
            failed.append(result.error)
    if not found:
        asked = f"none of its {len(hosts)} hosts knows it"
        if failed:
            asked = f"{len(failed)} of {len(hosts)} hosts could not be asked ({failed[0]})"
        raise RunError(
            f"there is no run {run_id!r} on this machine, and {asked}. A host forgets a run that "
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
    """Those of this run; what is none is left out."""
    for text in texts:
        with contextlib.suppress(ValueError, RunError):
            fields = json.loads(text)
            if isinstance(fields, dict) and fields.get("run_id") == run_id:
                yield RunSpec.from_dict(fields, run_id)
