"""What a run was asked to be: fixed at its start, kept in run.json, read again by ``--resume``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from hvd_elastic.errors import RunError

__all__ = ["SHORTEST_HEARTBEAT_S", "RunSpec", "forwarded_environment"]

SHORTEST_HEARTBEAT_S = 0.1
"""A failure timeout must leave room for some of these."""

_OF_THE_LEADER_ALONE = (
    # Where and as whom the leader's shell runs says nothing about the hosts.
    *("HOME", "HOST", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "USER"),
    *("_", "DISPLAY", "LS_COLORS", "STY", "TERM", "TERM_PROGRAM", "WAYLAND_DISPLAY", "WINDOWID"),
    *("XAUTHORITY", "INVOCATION_ID", "JOURNAL_STREAM", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"),
)
_PREFIXES_OF_THE_LEADER_ALONE = ("SSH_", "TMUX", "XDG_", "DBUS_", "VSCODE_", "HVD_ELASTIC_WORKER")
_RANK_VARIABLES = frozenset(
    f"HOROVOD_{name}"
    for name in (
        *("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "ELASTIC"),
        *("HOSTNAME", "CONTROLLER", "CPU_OPERATIONS", "GLOO_RENDEZVOUS_ADDR"),
        *("GLOO_RENDEZVOUS_PORT", "GLOO_IFACE"),
    )
)


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the leader's environment that workers get.

    All but those that describe the leader's own shell, session and ranks.

    >>> forwarded_environment({"WANDB_MODE": "offline", "SSH_TTY": "/dev/pts/1", "HOME": "/root"})
    {'WANDB_MODE': 'offline'}
    """
    own = {*_OF_THE_LEADER_ALONE, *_RANK_VARIABLES, "HVD_ELASTIC_AGENT"}
    return {
        name: value
        for name, value in environment.items()
        if name not in own and not name.startswith(_PREFIXES_OF_THE_LEADER_ALONE)
    }


@dataclass(frozen=True)
class RunSpec:
    """A run, as asked for.

    Attributes:
        command: the training command and its arguments.
        cwd: folder it runs in, on every host.
        hostfile: path of the hostfile; None for this machine alone.
        slots: processes on this machine when there is no hostfile.
        np: wanted number of processes; None for as many as allowed.
        min_np, max_np: bounds; ``max_np`` None for all slots.
        python: interpreter for the agents, the same path on every host.
        ssh_config: ssh configuration file; None for the user's.
        interface: network interface for the ring; None to find it.
        audit: record which examples were really read.
        tensorboard: write the metrics for TensorBoard, too.
        checkpoint_every_s: seconds between checkpoints; 0 for none.
        keep_checkpoints: how many to keep.
        checkpoint_folder: on the leader, or a URL; None for the run folder's.
        checkpoint_copies: other hosts that keep a copy of each shard.
        failure_timeout_s: silence after which a host or a worker counts as lost [s].
        pin_hosts: hosts that are used before all others, and that the policy keeps.
        spares: warm standbys beyond the wanted number of processes.
        leader_grace_s: how long the hosts go on without a leader [s].
        preemption_command: asked on every host whether it will be taken away; None: nothing is.
        policy: who decides the number of processes: ``fixed`` or ``goodput``.
        objective, min_speedup_per_slot, budget, deadline_s, target_examples: of the policy
            ``goodput``; see :class:`hvd_elastic.policy.objective.Objective`.
    """

    command: tuple[str, ...]
    cwd: str
    hostfile: str | None = None
    slots: int = 1
    np: int | None = None
    min_np: int = 1
    max_np: int | None = None
    python: str = "python3"
    ssh_config: str | None = None
    interface: str | None = None
    audit: bool = False
    tensorboard: bool = False
    checkpoint_every_s: float = 30.0
    keep_checkpoints: int = 3
    checkpoint_folder: str | None = None
    checkpoint_copies: int = 0
    failure_timeout_s: float = 5.0
    pin_hosts: tuple[str, ...] = ()
    spares: int = 0
    leader_grace_s: float = 60.0
    preemption_command: str | None = None
    policy: str = "fixed"
    objective: str = "goodput"
    min_speedup_per_slot: float = 0.5
    budget: float | None = None
    deadline_s: float | None = None
    target_examples: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For run.json. The environment is not part of it: secrets are not written to disk."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], run_id: str) -> RunSpec:
        """What :meth:`as_dict` gave.

        Raises:
            RunError: the run has no usable specification; names the first field that is not.
        """
        try:
            for name in ("command", "cwd"):
                if not fields.get(name):
                    raise ValueError(f"no {name}")
            return msgspec.convert(fields, cls)
        except ValueError as error:
            raise RunError(
                f"run {run_id} cannot be resumed: its run.json does not say what was run ({error})"
            ) from error

    @property
    def heartbeat_s(self) -> float:
        """Time between heartbeats [s]: ten of them may be missed."""
        return min(max(self.failure_timeout_s / 10, SHORTEST_HEARTBEAT_S), 1.0)

    @property
    def hostfile_path(self) -> Path | None:
        """The hostfile, made absolute."""
        return None if self.hostfile is None else Path(self.hostfile).absolute()
