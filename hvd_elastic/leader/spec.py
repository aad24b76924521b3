"""The specification of a run: fixed at its start, kept in run.json, read by ``--resume``."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.policy.objective import OBJECTIVES, Objective
from hvd_elastic.wire.messages import NOT_FINITE_CHOICES

POLICIES = ("fixed", "goodput")
_CHOICES = {"policy": POLICIES, "on_not_finite": NOT_FINITE_CHOICES, "objective": OBJECTIVES}
SHORTEST_HEARTBEAT_S = 0.1
"""Shortest time between heartbeats [s]; a failure timeout has to be at least twice as long."""

_OF_THE_LEADER_ALONE = (
    # These describe the leader's shell and session, and would be wrong on the other hosts.
    *("HOME", "HOST", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "USER"),
    *("_", "DISPLAY", "LS_COLORS", "STY", "TERM", "TERM_PROGRAM", "WAYLAND_DISPLAY", "WINDOWID"),
    *("XAUTHORITY", "INVOCATION_ID", "JOURNAL_STREAM", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"),
)
# The same for all variables that begin with one of these.
_PREFIXES_OF_THE_LEADER_ALONE = ("SSH_", "TMUX", "XDG_", "DBUS_", "VSCODE_", "HVD_ELASTIC_WORKER")
# Set for each worker by its agent; they are present if the leader itself runs under Horovod.
_RANK_VARIABLES = frozenset(
    f"HOROVOD_{name}"
    for name in (
        *("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "ELASTIC"),
        *("HOSTNAME", "CONTROLLER", "CPU_OPERATIONS", "GLOO_RENDEZVOUS_ADDR"),
        *("GLOO_RENDEZVOUS_PORT", "GLOO_IFACE"),
    )
)


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the leader's environment that are passed on to workers.

    These are all variables but those that describe the leader's own shell, session and ranks.

    >>> forwarded_environment({"WANDB_MODE": "offline", "SSH_TTY": "/dev/pts/1", "HOME": "/root"})
    {'WANDB_MODE': 'offline'}
    """
    own = {*_OF_THE_LEADER_ALONE, *_RANK_VARIABLES, "HVD_ELASTIC_AGENT"}
    return {
        name: value
        for name, value in environment.items()
        if name not in own and not name.startswith(_PREFIXES_OF_THE_LEADER_ALONE)
    }


def check_choices(options: Mapping[str, Any], spelled: Callable[[str], str] = str) -> None:
    """Check the options of a run that have a few valid values.

    Args:
        options: the given ones, by name; others are left alone.
        spelled: returns how the user writes an option.

    Raises:
        UsageError: one has another value.
    """
    for name, valid in _CHOICES.items():
        if (value := options.get(name, valid[0])) not in valid:
            raise UsageError(f"{spelled(name)} {value!r} is not known; valid: {', '.join(valid)}")


def check_objective(policy: str, given: Mapping[str, Any], spelled: Callable[[str], str]) -> None:
    """Check that the parts of an objective fit together, and to the policy.

    Args:
        given: those that the user has given: ``objective``, ``min_speedup_per_slot``, ``budget``,
            ``deadline`` and ``target_examples``.
        spelled: as of :func:`check_choices`; empty: there is no such option.

    Raises:
        UsageError: they do not.
    """
    check_choices(given, spelled)
    objective, kind = spelled("objective"), given.get("objective", OBJECTIVES[0])
    deadline, target = spelled("deadline"), spelled("target_examples")
    for name in given:
        if policy != "goodput":
            wanted = f"{spelled('policy')} goodput"
            raise UsageError(f"{spelled(name)} is of use with {wanted} only; add it")
        owner = "efficiency" if name == "min_speedup_per_slot" else "cost"
        if name != "objective" and kind != owner:
            raise UsageError(f"{spelled(name)} belongs to {objective} {owner}; add that")
    if kind == "cost" and not {"budget", "deadline"} & given.keys():
        ways = filter(None, (spelled("budget"), deadline))
        raise UsageError(f"{objective} cost needs a {', or a '.join(ways)}")
    if ("deadline" in given) != ("target_examples" in given):
        raise UsageError(
            f"{deadline} and {target} belong together: the target says what to do by the deadline"
        )
    if (share := given.get("min_speedup_per_slot", 0.0)) > 1:
        raise UsageError(
            f"{spelled('min_speedup_per_slot')} {share:g} is above 1, and no slot "
            "brings more than one alone does: give a share of that, such as 0.5"
        )


def check_patience(failure_timeout_s: float, name: str) -> None:
    """Check a failure timeout.

    Raises:
        UsageError: it is too short.
    """
    least = 2 * SHORTEST_HEARTBEAT_S
    if failure_timeout_s < least:
        raise UsageError(
            f"{name} {failure_timeout_s:g} is below two heartbeats, which come "
            f"every {SHORTEST_HEARTBEAT_S:g} s at the most often. Give at least {least:g}; "
            "a few seconds forgive a busy network."
        )


@dataclass(frozen=True)
class RunSpec:
    """Everything a user specified about a run, defaults included.

    Attributes:
        command: training command with its arguments.
        cwd: working directory of the command on every host.
        hostfile: path of the hostfile; None: the run uses this machine only.
        exclude: list of hosts of the hostfile that are not used; None: all are.
        engine: name of what owns the hosts and writes the hostfile; None: the user.
        slots: number of processes on this machine when there is no hostfile.
        np: requested number of processes; None: as many as allowed.
        min_np, max_np: bounds of the number of processes; ``max_np`` None: all slots.
        python: path of the agents' interpreter, the same on every host.
        ssh_config: path of an ssh configuration file; None: the user's own.
        interface: network interface for the ring; None: it is detected.
        on_not_finite: what is done about a step whose gradients are not finite: ``skip``, ``stop``
            or ``ignore``.
        profile: rank of which a few steps are profiled; None: none.
        tensorboard: whether to write the metrics for TensorBoard as well.
        checkpoint_every_s: time between checkpoints [s]; 0: no checkpoints.
        checkpoint_folder: folder on the leader, or URL; None: the folder in the run folder.
        checkpoint_copies: number of other hosts that keep a copy of each shard.
        failure_timeout_s: silence after which a host or a worker counts as lost [s].
        pin_hosts: hosts that are used before all others, and that the policy never gives up.
        spares: number of warm standbys beyond the requested number of processes.
        input_hosts: hosts that read for the ranks and do not train.
        leader_grace_s: how long the hosts continue without a leader [s].
        preemption: cloud whose metadata service each host asks whether it is about to be taken
            away: a name of ``CLOUDS`` in ``agent.preemption.clouds``; None: nothing is asked.
        preemption_command: command that reports on each host whether the host is about to be
            preempted; None: nothing is asked.
        plain: whether the command is no training script; its exit status alone counts.
        hash_seed: the user's ``PYTHONHASHSEED``; None: it follows from the name of the run.
        policy: what decides the number of processes: ``fixed`` or ``goodput``.
        objective: what the policy ``goodput`` is after.
    """

    command: tuple[str, ...]
    cwd: str
    hostfile: str | None = None
    exclude: str | None = None
    engine: str | None = None
    slots: int = 1
    np: int | None = None
    min_np: int = 1
    max_np: int | None = None
    python: str = "python3"
    ssh_config: str | None = None
    interface: str | None = None
    audit: bool = False
    on_not_finite: str = NOT_FINITE_CHOICES[0]
    profile: int | None = None
    tensorboard: bool = False
    checkpoint_every_s: float = 30.0
    keep_checkpoints: int = 3
    checkpoint_folder: str | None = None
    checkpoint_copies: int = 0
    failure_timeout_s: float = 5.0
    pin_hosts: tuple[str, ...] = ()
    spares: int = 0
    input_hosts: tuple[str, ...] = ()
    leader_grace_s: float = 60.0
    preemption: str | None = None
    preemption_command: str | None = None
    plain: bool = False
    hash_seed: str | None = None
    policy: str = "fixed"
    objective: Objective = field(default_factory=Objective)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for run.json.

        The environment is not one of them, so that no secret is written to disk.
        """
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], run_id: str) -> RunSpec:
        """Return the specification that :meth:`as_dict` turned into ``fields``.

        Raises:
            RunError: the specification is not usable; the message names the first invalid field.
        """
        try:
            for name in ("command", "cwd"):
                if not fields.get(name):
                    raise ValueError(f"no {name}")
            return msgspec.convert(fields, cls)
        except ValueError as error:
            raise RunError(
                f"run {run_id} cannot be resumed: its run.json was written by another version of "
                f"hvd_elastic, or was changed ({error}). Resume it with the version that started "
                "it, or start a new run"
            ) from error

    def environment(self, given: Mapping[str, str], run_id: str) -> dict[str, str]:
        """Return the variables of all workers of the run, with one ``PYTHONHASHSEED`` for all.

        By default each process of Python orders ``set(text)`` in another way: workers would make
        different vocabularies of the same text. The user's own value is kept.

        >>> RunSpec(("true",), "/").environment({}, "run-1")
        {'PYTHONHASHSEED': '711764195'}
        """
        seed = self.hash_seed or str(zlib.crc32(run_id.encode()))
        return {**given, "PYTHONHASHSEED": given.get("PYTHONHASHSEED") or seed}

    @property
    def heartbeat_s(self) -> float:
        """Return the time between heartbeats [s]: a tenth of the failure timeout, within limits."""
        return min(max(self.failure_timeout_s / 10, SHORTEST_HEARTBEAT_S), 1.0)

    @property
    def hostfile_path(self) -> Path | None:
        """Return the absolute path of the hostfile; None if there is none."""
        return None if self.hostfile is None else Path(self.hostfile).absolute()
