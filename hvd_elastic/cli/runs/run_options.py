"""The options of ``hvd-elastic run``, their checks, and their conversion to a RunSpec."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from hvd_elastic.agent.gpus import usable_gpus
from hvd_elastic.agent.worker_start import training_script
from hvd_elastic.cli.options import (
    EventsAsJson,
    SshConfigOption,
    argument,
    hostfile_option,
    number_option,
    option,
    whole_number_option,
)
from hvd_elastic.cli.runs.scaling_options import ObjectiveOptions, flag_of
from hvd_elastic.engines.base import CLOUD, INSIDE, engine_around, engine_named
from hvd_elastic.errors import HostfileError, HvdElasticError, UsageError, raise_together
from hvd_elastic.formatting import count, hosts_named
from hvd_elastic.hosts.hostfile import Host, Hostfile, expand_hosts, is_named, parse_hostfile
from hvd_elastic.hosts.ssh_config import ssh_config_for
from hvd_elastic.leader.hostfile_watch import input_hosts
from hvd_elastic.leader.resuming import check_sizes, check_slots
from hvd_elastic.leader.spec import POLICIES, RunSpec, check_choices, check_patience
from hvd_elastic.records.tensorboard import check_tensorboard
from hvd_elastic.urls import is_url
from hvd_elastic.wire.messages import NOT_FINITE_CHOICES


@dataclass(frozen=True)
class EngineFlags:
    """A flag for each engine that a run can be started in."""

    slurm: Annotated[
        bool, option(f"train on {INSIDE['slurm']} (the default inside of one)", "--slurm")
    ] = False

    @property
    def asked(self) -> str | None:
        return next((name for name, given in asdict(self).items() if given), None)


@dataclass(frozen=True)
class RunOptions:
    """The options on the command line; fields have the same names as in :class:`RunSpec`."""

    command: Annotated[
        list[str] | None, argument("the training command, after --", "-- COMMAND [ARG]...")
    ] = None
    hostfile: Annotated[
        Path | None,
        hostfile_option(
            f"hosts and slots; without it {' or '.join(INSIDE.values())}, or the GPUs of this "
            "machine",
            "--hosts",
        ),
    ] = None
    exclude: Annotated[
        str | None,
        option(
            "hosts of the hostfile, as in gpu[03-04],@LABEL, that are not used",
            "--exclude",
            "--exclude-hosts",
            "-x",
            metavar="LIST",
        ),
    ] = None
    inside: EngineFlags = field(default_factory=EngineFlags)
    cloud: Annotated[
        str | None,
        option(
            "train on the machines of this cloud (see: hvd-elastic cloud up), and ask it for more",
            metavar="NAME",
        ),
    ] = None
    np: Annotated[
        int | None,
        whole_number_option("wanted number of workers (default: all slots)", "--np", "-n", "-np"),
    ] = None
    min_np: Annotated[int, whole_number_option("fewest workers to train with", "--min-np")] = 1
    max_np: Annotated[
        int | None, whole_number_option("most workers (default: all slots)", "--max-np")
    ] = None
    run_id: Annotated[str | None, option("name of the run (default: date and time)")] = None
    policy: Annotated[str, option("who decides the number of workers: fixed (you) or goodput")] = (
        "fixed"
    )
    goal: ObjectiveOptions = field(default_factory=ObjectiveOptions)
    pin_hosts: Annotated[
        str | None,
        option(
            "hosts, as in gpu[01-02], that are used before all others and kept by the policy",
            metavar="LIST",
        ),
    ] = None
    input_hosts: Annotated[
        str | None,
        option(
            "hosts, as in cpu[1-4],@LABEL, that read and transform the data for those that train",
            metavar="LIST",
        ),
    ] = None
    resume: Annotated[
        str | None, option("resume a run: its live workers, or else its newest checkpoint")
    ] = None
    detach: Annotated[
        bool, option("run in the background; see attach and logs", "--detach", "-d")
    ] = False
    checkpoint_every_s: Annotated[
        float, number_option("seconds between checkpoints, 0 for none", "--checkpoint-every")
    ] = 30.0
    keep_checkpoints: Annotated[
        int, whole_number_option("how many checkpoints to keep", "--keep-checkpoints")
    ] = 3
    checkpoint_folder: Annotated[
        str | None,
        option(
            "folder or URL (s3://…) for checkpoints (default: in the run folder)",
            "--checkpoint-dir",
            metavar="DIR|URL",
        ),
    ] = None
    checkpoint_copies: Annotated[
        int,
        whole_number_option(
            "copies of each checkpoint shard on other hosts", "--checkpoint-copies", least=0
        ),
    ] = 0
    python: Annotated[str | None, option("Python on every host (default: this one's path)")] = None
    ssh_config: SshConfigOption = None
    interface: Annotated[
        str | None,
        option("interface of the ring (default: the one ssh came in by)", "--network-interface"),
    ] = None
    failure_timeout_s: Annotated[
        float,
        number_option(
            "seconds of silence after which a host or worker counts as lost",
            "--failure-timeout",
            above=True,
        ),
    ] = 5.0
    spares: Annotated[
        int,
        whole_number_option(
            "warm standbys that take a lost worker's place at once", "--spares", least=0
        ),
    ] = 0
    leader_grace_s: Annotated[
        float,
        number_option(
            "seconds the hosts train on without a leader, for --resume", "--leader-grace"
        ),
    ] = 60.0
    preemption: Annotated[
        str | None,
        option(
            "cloud of the hosts (aws, gcp or azure), whose metadata service each host asks "
            "every second whether it will be preempted",
            metavar="CLOUD",
        ),
    ] = None
    preemption_command: Annotated[
        str | None,
        option(
            "run on every host every 5 s; exit status 0 means that the host will be preempted",
            metavar="COMMAND",
        ),
    ] = None
    audit: Annotated[bool, option("record which examples were really read", "--audit")] = False
    on_not_finite: Annotated[
        str,
        option(
            "what to do about steps whose gradients are not finite: skip them (ten in a row "
            "end the run), stop the run, or ignore it",
            metavar="skip|stop|ignore",
        ),
    ] = NOT_FINITE_CHOICES[0]
    profile: Annotated[
        int | None,
        whole_number_option(
            "record a few steps of this rank with PyTorch's profiler; hvd-elastic get brings "
            "the file",
            "--profile",
            least=0,
            metavar="RANK",
        ),
    ] = None
    tensorboard: Annotated[
        bool, option("write the metrics for TensorBoard as well", "--tensorboard")
    ] = False
    mpi: Annotated[bool, option("a static job through Open MPI's mpirun", "--mpi")] = False
    as_json: EventsAsJson = False

    @property
    def engine(self) -> str | None:
        """Return the engine that gives the hosts; None: the user names them.

        Raises:
            UsageError: the user has asked for an engine, and for other hosts.
        """
        asked = self.inside.asked or (None if self.cloud is None else f"{CLOUD}{self.cloud}")
        if self.hostfile is None and not self.mpi and not (self.inside.asked and self.cloud):
            return asked or engine_around(os.environ)
        if asked is not None:
            flag = f"--{self.inside.asked or 'cloud'}"
            other = "--hostfile" if self.hostfile else "--mpi" if self.mpi else "--cloud"
            raise UsageError(f"{flag} and {other} do not go together; leave one of them out")
        return None

    @functools.cached_property
    def given(self) -> Hostfile | None:
        """Return the hosts that an engine has given to this process; None: none has.

        Raises:
            HvdElasticError: they cannot be used, or there are none and the user has asked for them.
        """
        return None if self.engine is None else engine_named(self.engine).hosts(os.environ)

    def hosts(self) -> Hostfile | None:
        """Return the hosts that the run begins with; None: this machine alone.

        Raises:
            HvdElasticError: the hostfile cannot be used, or ``--exclude`` names what it has not.
        """
        found, excluded = self.given, self.exclude
        if found is None and self.hostfile is not None:
            found = parse_hostfile(self.hostfile)
        if excluded is None:
            return found
        if found is None:
            raise UsageError("--exclude names hosts of a hostfile; give one with --hostfile")
        try:
            found.choose(excluded)
        except HostfileError as error:
            raise UsageError(f"--exclude: {error}") from error
        try:
            return found.without(excluded)
        except HostfileError as error:
            raise UsageError(str(error)) from error

    def check(self) -> None:
        """Check all options before any host is contacted.

        Raises:
            HvdElasticError: an option is wrong; if several are, SeveralErrors names all of them.
        """
        try:
            Path.cwd()
        except FileNotFoundError:
            raise UsageError(
                "the current folder was removed; cd to the folder of the script, even if it was "
                "made again at the same place"
            ) from None
        _ = self.given  # if it cannot be used, this alone is reported
        raise_together(
            lambda: check_slots(self.hosts(), self.np, self.min_np, self.spares),
            self._check_pinned,
            self._check_input_hosts,
            lambda: check_sizes(self.np, self.min_np, self.max_np, mpi=self.mpi),
            self._check_mpi,
            self._check_preemption,
            self._check_policy,
            self._check_on_not_finite,
            self._check_profile,
            self._check_scaling,
            lambda: check_patience(self.failure_timeout_s, "--failure-timeout"),
            lambda: check_ssh_config(self.ssh_config),
            lambda: check_tensorboard_option(self.tensorboard, mpi=self.mpi),
            self._check_command,
        )

    def spec(self) -> RunSpec:
        """Return the specification of the run that the options describe."""
        names = [field.name for field in fields(RunSpec)]
        # The rest, which has no option, keeps its default.
        asked: dict[str, Any] = {n: getattr(self, n) for n in names if hasattr(self, n)}
        place = self.checkpoint_folder
        asked |= {
            "command": tuple(self.command or ()),
            "cwd": str(Path.cwd()),
            "hostfile": None if self.hostfile is None else str(self.hostfile.absolute()),
            "slots": (self.np or self.max_np or max(self.min_np, self._gpus)) + self.spares,
            "python": self.python or sys.executable,
            "ssh_config": ssh_config_for(self.hostfile, self.ssh_config),
            "input_hosts": self._input_hosts(),
            "pin_hosts": tuple(host.name for host in self._pinned()),
            "hash_seed": os.environ.get("PYTHONHASHSEED"),
            "objective": self.goal.as_objective(self.policy),
        }
        if place is not None and not is_url(place):
            asked["checkpoint_folder"] = str(Path(place).absolute())
        spec = RunSpec(**asked)
        return spec if self.engine is None else engine_named(self.engine).adapt(spec)

    def says_size(self) -> str:
        """Return a sentence on the size of a run for which the user has named none; else ""."""
        if self.hostfile or self.engine or self.np or self.max_np:
            return ""
        gpus, workers = self._gpus, count(max(self.min_np, self._gpus), "worker")
        what = f"its {gpus} GPUs" if gpus > 1 else "its GPU" if gpus else "it has no GPU to use"
        return f"{workers} on this machine ({what}); --np and --hostfile change that"

    def says_python(self) -> str:
        """Return a sentence on a ``python`` that is not of this program's environment; else ""."""
        named = (self.command or [""])[0]
        found = shutil.which(named)
        folder = Path(sys.executable).parent
        if named not in ("python", "python3") or found is None or sys.prefix == sys.base_prefix:
            return ""
        if Path(found).parent.samefile(folder):
            return ""
        activate = shlex.quote(str(folder / "activate"))
        return (
            f"note: {named} is {found}, and hvd-elastic is of {sys.prefix}. If the script is to "
            f"use that one, activate it (. {activate}), or give the path of its python"
        )

    @functools.cached_property
    def _gpus(self) -> int:
        """Number of GPUs that have a worker each; 0 if the hosts are named."""
        return 0 if self.hostfile or self.engine else usable_gpus(os.environ)

    def _pinned(self) -> list[Host]:
        if self.pin_hosts is None:
            return []
        hosts = self.hosts()
        if hosts is None:
            raise UsageError("--pin-hosts names hosts of a hostfile; give one with --hostfile")
        try:
            return list(hosts.choose(self.pin_hosts))
        except HostfileError as error:
            raise UsageError(f"--pin-hosts: {error}") from error

    def _input_hosts(self) -> tuple[str, ...]:
        if self.input_hosts is None:
            return ()
        found: dict[str, None] = {}
        try:
            for name in expand_hosts(self.input_hosts, labels=True):
                if not name.startswith("@"):
                    found[name] = None
                elif (hosts := self.hosts()) is not None:
                    found |= dict.fromkeys(host.name for host in hosts.choose(name))
                else:
                    raise HostfileError(f"{name} names hosts of a hostfile; give one (--hostfile)")
            return (*found,)
        except HostfileError as error:
            raise UsageError(f"--input-hosts: {error}") from error

    def _check_input_hosts(self) -> None:
        named = self._input_hosts()
        try:
            known = self.hosts()
        except HvdElasticError:
            return  # check_slots reports the error
        if self.exclude is not None:
            both = [name for name in named if is_named(Host(name), self.exclude)]
            if both:
                raise UsageError(
                    f"--input-hosts and --exclude both name {hosts_named(both)}; leave them out of "
                    "one of the two"
                )
        hosts = [] if known is None else [*known]
        source = "" if known is None else known.source
        reading = input_hosts(hosts, named, source)
        if reading and self.mpi:
            raise UsageError(
                "a job under --mpi has no leader to lead input hosts: leave --input-hosts and "
                "hosts with slots=0 out"
            )
        if hosts and all(host in reading for host in hosts):
            raise UsageError(f"all hosts of {source} read, and none trains: add one")

    def _check_pinned(self) -> None:
        slots = sum(host.slots for host in self._pinned())
        for flag, limit in (("--np", self.np), ("--max-np", self.max_np)):
            if limit is not None and limit < slots:
                raise UsageError(
                    f"{flag} {limit} is below the {count(slots, 'slot')} of the hosts that "
                    f"--pin-hosts {self.pin_hosts} keeps as a whole. Raise it to {slots}, or "
                    "pin fewer hosts."
                )

    def _check_scaling(self) -> None:
        if self.mpi and self.policy == "goodput":
            raise UsageError("a job under --mpi has a fixed size: leave --policy goodput out")
        if self.policy in POLICIES:
            self.goal.as_objective(self.policy)
        try:
            hosts, pinned = self.hosts(), self._pinned()
        except HvdElasticError:
            return  # other checks report the error
        named = hosts if self.given is None else self.given.hosts
        self.goal.check_prices(named, self.min_np, self.np, pinned)

    def _check_mpi(self) -> None:
        for flag, value in (
            ("--pin-hosts", self.pin_hosts),
            ("--preemption", self.preemption),
            ("--preemption-command", self.preemption_command),
        ):
            if self.mpi and value is not None:
                raise UsageError(f"a job under --mpi keeps its hosts to the end: leave {flag} out")

    def _check_preemption(self) -> None:
        from hvd_elastic.agent.preemption.clouds import CLOUDS

        if self.preemption is not None and self.preemption not in CLOUDS:
            raise UsageError(
                f"--preemption {self.preemption!r} is no cloud that is known: give "
                f"{', '.join(CLOUDS)}, or a command of your own with --preemption-command"
            )
        if self.preemption_command is not None and not self.preemption_command.strip():
            raise UsageError(
                "--preemption-command is empty, and what does nothing says with its exit status 0 "
                "that the host goes: give a command, or leave it out"
            )

    def _check_policy(self) -> None:
        check_choices({"policy": self.policy}, flag_of)

    def _check_on_not_finite(self) -> None:
        check_choices({"on_not_finite": self.on_not_finite}, flag_of)
        if self.mpi and self.on_not_finite != NOT_FINITE_CHOICES[0]:
            raise UsageError(
                "--on-not-finite is not passed on by --mpi: leave it out, and set "
                f"HVD_ELASTIC_ON_NOT_FINITE={self.on_not_finite} for the processes of mpirun"
            )

    def _check_profile(self) -> None:
        if self.profile is not None and self.mpi:
            raise UsageError("--profile is not passed on by --mpi: leave one of them out")
        try:
            most = self._most_workers()
        except HvdElasticError:
            return  # other checks report the error
        if self.profile is not None and most is not None and self.profile >= most:
            ranks = "worker has rank 0" if most == 1 else f"workers have the ranks 0 to {most - 1}"
            raise UsageError(f"--profile {self.profile}: {most} {ranks}")

    def _most_workers(self) -> int | None:
        """Return how many workers the options and the present hosts allow; None: not known."""
        hosts, asked = self.hosts(), self.np if self.max_np is None else self.max_np
        if hosts is None:
            return asked or max(self.min_np, self._gpus)
        return min(asked or hosts.slots, hosts.slots - self.spares)

    def _check_command(self) -> None:
        command = self.command
        if not command:
            raise UsageError("no command to run. Give it after --, for example: -- python train.py")
        if shutil.which(command[0]) is None:
            if command[0].endswith(".py") and Path(command[0]).is_file():
                raise UsageError(
                    f"the script {command[0]} is no executable file. Start it with Python: "
                    f"-- python {shlex.join(command)}"
                )
            raise UsageError(
                f"the command {command[0]!r} is not on PATH, nor an executable file. Give the "
                "command after --, for example: -- python train.py"
            )
        script = training_script(command)
        if script is not None and not Path(script).is_file():
            raise UsageError(f"the training script {script} does not exist in {Path.cwd()}")


def check_tensorboard_option(wanted: bool, *, mpi: bool) -> None:
    """Raise an error if ``--tensorboard`` is given but its files could not be written."""
    if not wanted:
        return
    if mpi:
        raise UsageError(
            "a job under --mpi has no leader to write for TensorBoard: leave --tensorboard out and "
            "set HVD_ELASTIC_RUN_FOLDER and HVD_ELASTIC_TENSORBOARD=1, for rank 0 to do it"
        )
    check_tensorboard("--tensorboard")


def check_ssh_config(ssh_config: Path | None) -> None:
    """Raise UsageError if the ssh configuration does not exist."""
    if ssh_config is not None and not ssh_config.expanduser().is_file():
        raise UsageError(
            f"--ssh-config {ssh_config}: no such file; name an ssh configuration, or leave it out "
            "to use ~/.ssh/config"
        )
