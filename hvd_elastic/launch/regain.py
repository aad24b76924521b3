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
from typing import Any

from hvd_elastic.cluster.commands import CommandSettings, run_on_hosts
from hvd_elastic.cluster.hostfile import Host
from hvd_elastic.cluster.ssh import SshOptions
from hvd_elastic.errors import RunError

__all__ = ["find_run", "keep_run"]

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


def find_run(run_id: str, hosts: Sequence[Host], options: SshOptions) -> dict[str, Any]:
    """What a run was asked to be, from the first of its hosts that knows.

    Args:
        run_id: a valid one.
        hosts: of its hostfile.
        options: how to reach them.

    Raises:
        RunError: no host knows the run; says how many could not be asked.
    """
    home = os.environ.get("HVD_ELASTIC_HOME")
    folder = '"$HOME"/.hvd_elastic' if home is None else shlex.quote(home)
    command = f"cat {folder}/spool/{shlex.quote(run_id)}/*/{_NAME} 2>/dev/null || true"
    failed: list[str] = []
    for result in run_on_hosts(hosts, command, options, CommandSettings(timeout_s=_LIMIT_S)):
        if not result.ok:
            failed.append(result.error)
            continue
        for fields in _objects(result.answer.stdout.splitlines()):
            if fields.get("run_id") == run_id:
                return fields
    asked = f"none of its {len(hosts)} hosts knows it"
    if failed:
        asked = f"{len(failed)} of {len(hosts)} hosts could not be asked ({failed[0]})"
    raise RunError(
        f"there is no run {run_id!r} on this machine, and {asked}. A host forgets a run that has "
        "ended, unless it holds a checkpoint that no leader has fetched"
    )


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found
