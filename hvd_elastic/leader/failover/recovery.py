"""Recovers the specification of a run from its hosts when the leader's machine and disk are lost.

Each agent keeps the run's specification in the spool of its host (:mod:`hvd_elastic.agent.spool`).
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence

from hvd_elastic.agent.spool import SPEC_NAME
from hvd_elastic.config import runs_folder
from hvd_elastic.errors import RunError
from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.fanout import Stopper, fan_out
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.ssh import connect
from hvd_elastic.json_text import parse_json
from hvd_elastic.leader.spec import RunSpec

WHAT_IS_TRUSTED = (
    *("command", "cwd", "python", "preemption_command", "checkpoint_folder", "interface"),
    "input_hosts",
)
"""Fields that decide which programs run, on which further hosts, and where files go; all hosts have
to agree on them, so that one manipulated host cannot change them unnoticed."""

_LIMIT_S = 30.0
"""Time limit for reading the small files on one host [s]; a slower host counts as unreachable."""


def find_run(run_id: str, hosts: Sequence[Host], options: SshOptions) -> RunSpec:
    """Return the specification of a run that its hosts have kept.

    Args:
        run_id: valid name of a run.
        hosts: hosts of the run's hostfile.
        options: ssh options for the connections.

    Raises:
        RunError: no host knows the run, or hosts disagree on a field of ``WHAT_IS_TRUSTED``.
    """
    home = os.environ.get("HVD_ELASTIC_HOME")
    folder = '"$HOME"/.hvd_elastic' if home is None else shlex.quote(home)
    command = f"cat {folder}/spool/{shlex.quote(run_id)}/*/{SPEC_NAME} 2>/dev/null || true"

    def read(host: Host, stopper: Stopper) -> list[bytes]:
        with connect(host, options) as connection:
            stopper.add(connection.close)
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
