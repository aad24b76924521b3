"""``hvd-elastic run``: flags to a :class:`RunSpec`, then one leader."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hvd_elastic.cli.numbers import number_option, whole_number_option
from hvd_elastic.cli.scaling_options import ScalingOptions
from hvd_elastic.errors import (
    HostfileError,
    HvdElasticError,
    RunError,
    SeveralErrors,
    UsageError,
)
from hvd_elastic.formatting import count

if TYPE_CHECKING:
    from hvd_elastic.hosts.hostfile import Host
    from hvd_elastic.leader.spec import RunSpec
    from hvd_elastic.records.run_folder import RunFolder

__all__ = ["run"]

_POLICIES = ("fixed", "goodput")
_MPI_AND_ELASTIC = "a job under --mpi has a fixed size: leave --min-np and --max-np out, give --np"


_WITH_RESUME = {
    *("resume", "command", "hostfile", "ssh_config", "np", "max_np", "detach", "json_output"),
}


def run(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(help="the training command, after --", metavar="-- COMMAND [ARG]..."),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option("--hostfile", "-H", help="hosts and slots; without it this machine alone"),
    ] = None,
    np: Annotated[
        int | None,
        whole_number_option("--np", "-n", help="wanted number of processes (default: all slots)"),
    ] = None,
    min_np: Annotated[
        int, whole_number_option("--min-np", help="fewest processes to train with")
    ] = 1,
    max_np: Annotated[
        int | None, whole_number_option("--max-np", help="most processes (default: all slots)")
    ] = None,
    run_id: Annotated[
        str | None, typer.Option(help="name of the run (default: date and time)")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="who decides the number of processes: fixed (you) or goodput")
    ] = "fixed",
    objective: Annotated[
        str | None,
        typer.Option(help="of --policy goodput: goodput, efficiency or cost (default: goodput)"),
    ] = None,
    min_speedup_per_slot: Annotated[
        float | None,
        number_option(
            "--min-speedup-per-slot",
            above=True,
            help="of --objective efficiency: least speedup divided by slots (default: 0.5)",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="of --objective cost: most that the hosts in use may cost, such as 40/h",
            metavar="PRICE/h",
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            help="of --objective cost: reach --target-examples within, such as 6h or 90m",
            metavar="TIME",
        ),
    ] = None,
    target_examples: Annotated[
        float | None,
        number_option(
            "--target-examples",
            above=True,
            help="of --deadline: useful examples to be reached, such as 5e7",
        ),
    ] = None,
    pin_hosts: Annotated[
        str | None,
        typer.Option(
            help="hosts, as in gpu[01-02], that are used before all others and kept by the policy",
            metavar="LIST",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="lead a run on: its live processes, or else its newest checkpoint"),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="run in the background; see attach and logs")
    ] = False,
    checkpoint_every: Annotated[
        float, number_option("--checkpoint-every", help="seconds between checkpoints, 0 for none")
    ] = 30.0,
    keep_checkpoints: Annotated[
        int, whole_number_option("--keep-checkpoints", help="how many checkpoints to keep")
    ] = 3,
    checkpoint_dir: Annotated[
        str | None,
        typer.Option(
            help="folder or URL (s3://…) for checkpoints (default: in the run folder)",
            metavar="DIR|URL",
        ),
    ] = None,
    checkpoint_copies: Annotated[
        int,
        whole_number_option(
            "--checkpoint-copies", least=0, help="copies of each checkpoint shard on other hosts"
        ),
    ] = 0,
    python: Annotated[
        str | None, typer.Option(help="Python on every host (default: this one's path)")
    ] = None,
    ssh_config: Annotated[
        Path | None,
        typer.Option(
            "--ssh-config",
            "-F",
            envvar="HVD_ELASTIC_SSH_CONFIG",
            help="ssh configuration (default: ~/.ssh/config)",
        ),
    ] = None,
    network_interface: Annotated[
        str | None, typer.Option(help="interface of the ring (default: the one ssh came in by)")
    ] = None,
    failure_timeout: Annotated[
        float,
        number_option(
            "--failure-timeout",
            above=True,
            help="seconds of silence after which a host or worker counts as lost",
        ),
    ] = 5.0,
    spares: Annotated[
        int,
        whole_number_option(
            "--spares", least=0, help="warm standbys that take a lost process's place at once"
        ),
    ] = 0,
    leader_grace: Annotated[
        float,
        number_option(
            "--leader-grace", help="seconds the hosts train on without a leader, for --resume"
        ),
    ] = 60.0,
    preemption_command: Annotated[
        str | None,
        typer.Option(
            help="run on every host every 5 s; exit status 0 says that the host will be taken away",
            metavar="COMMAND",
        ),
    ] = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="record which examples were really read")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="write the metrics for TensorBoard as well")
    ] = False,
    mpi: Annotated[
        bool, typer.Option("--mpi", help="a static job through Open MPI's mpirun")
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="print every event as a JSON line")
    ] = False,
) -> None:
    """Train a script over the hosts of a hostfile, elastically.

    The script imports [bold]hvd_elastic.torch[/bold]. Edit the hostfile while it runs and hosts
    join or leave; a host that dies is left out and comes back when it answers again.

    Examples:
      hvd-elastic run -- python train.py

      hvd-elastic run --hostfile hosts -- python train.py --lr 0.1

      hvd-elastic run -H hosts --np 8 --min-np 4 --run-id resnet -- python train.py

      hvd-elastic run -H hosts --max-np 16 --policy goodput -- python train.py

      hvd-elastic run --resume resnet

    Exit status: 0 when training finished, 1 when it failed, 2 for wrong usage, 130 when stopped.
    """
    from hvd_elastic.records.run_folder import RunFolder

    if resume is not None:
        _check_resume_options(context)
        _check_ssh_config(ssh_config)
        folder = _folder_to_resume(resume, hostfile, ssh_config)
        _check_not_complete(folder)
        spec = _resumed_spec(folder, command, hostfile, ssh_config, np, max_np)
    else:
        scaling = ScalingOptions(
            policy, objective, min_speedup_per_slot, budget, deadline, target_examples
        )
        _raise_together(
            lambda: _check_hostfile(hostfile, np, min_np, spares),
            lambda: _check_pinned(pin_hosts, hostfile, np, max_np),
            lambda: _check_sizes(np, min_np, max_np, mpi),
            lambda: _check_mpi(mpi, pin_hosts, preemption_command),
            lambda: _check_preemption_command(preemption_command),
            lambda: _check_policy(policy),
            lambda: _check_scaling(scaling, hostfile, np, min_np, pin_hosts, mpi),
            lambda: _check_patience(failure_timeout),
            lambda: _check_ssh_config(ssh_config),
            lambda: _check_tensorboard(tensorboard, mpi=mpi),
            lambda: _check_command(command),
        )
        spec = _spec(
            command=command or [],
            hostfile=hostfile,
            np=np,
            min_np=min_np,
            max_np=max_np,
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            checkpoint_dir=checkpoint_dir,
            checkpoint_copies=checkpoint_copies,
            python=python,
            ssh_config=ssh_config,
            network_interface=network_interface,
            failure_timeout=failure_timeout,
            pin_hosts=tuple(host.name for host in _pinned(pin_hosts, hostfile)),
            spares=spares,
            leader_grace=leader_grace,
            preemption_command=preemption_command,
            audit=audit,
            tensorboard=tensorboard,
            scaling=scaling,
        )
        from hvd_elastic.checkpoint.place import check_new_place

        if mpi:
            from hvd_elastic.leader.mpi import run_mpi

            raise typer.Exit(run_mpi(spec, os.environ))
        if spec.checkpoint_folder is not None:
            check_new_place(spec.checkpoint_folder)  # before the run id is taken
        folder = RunFolder.create(run_id, spec.as_dict())
    resumed = resume is not None
    if detach:
        _lead_in_background(spec, folder, resumed=resumed)
        return
    made_now = folder.began_elsewhere and not folder.events.exists()
    status = _lead(spec, folder, resumed=resumed, json_output=json_output, forget=made_now)
    raise typer.Exit(status)


def _spec(
    *,
    command: list[str],
    hostfile: Path | None,
    np: int | None,
    min_np: int,
    max_np: int | None,
    checkpoint_every: float,
    keep_checkpoints: int,
    checkpoint_dir: str | None,
    checkpoint_copies: int,
    python: str | None,
    ssh_config: Path | None,
    network_interface: str | None,
    failure_timeout: float,
    pin_hosts: tuple[str, ...],
    spares: int,
    leader_grace: float,
    preemption_command: str | None,
    audit: bool,
    tensorboard: bool,
    scaling: ScalingOptions,
) -> RunSpec:
    from hvd_elastic.leader.spec import RunSpec

    return RunSpec(
        command=tuple(command),
        cwd=str(Path.cwd()),
        hostfile=None if hostfile is None else str(hostfile.absolute()),
        slots=(np or max_np or 1) + spares,
        np=np,
        min_np=min_np,
        max_np=max_np,
        python=python or sys.executable,
        ssh_config=_ssh_config_for(hostfile, ssh_config),
        interface=network_interface,
        audit=audit,
        tensorboard=tensorboard,
        checkpoint_every_s=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        checkpoint_folder=_checkpoint_folder(checkpoint_dir),
        checkpoint_copies=checkpoint_copies,
        failure_timeout_s=failure_timeout,
        pin_hosts=pin_hosts,
        spares=spares,
        leader_grace_s=leader_grace,
        preemption_command=preemption_command,
        **scaling.fields(),
    )


def _ssh_config_for(hostfile: Path | None, ssh_config: Path | None) -> str | None:
    """The one that is named, else that of a virtual cluster, else None: the user's."""
    from hvd_elastic.hosts.ssh_config import config_beside

    if ssh_config is None and hostfile is not None:
        ssh_config = config_beside(hostfile)
    return None if ssh_config is None else str(ssh_config.absolute())


def _raise_together(*checks: Callable[[], None]) -> None:
    """Look at everything before anything is begun, and name all mistakes at once."""
    found: list[HvdElasticError] = []
    for check in checks:
        try:
            check()
        except HvdElasticError as error:
            found.append(error)
    if len(found) == 1:
        raise found[0]
    if found:
        raise SeveralErrors(found)


def _check_hostfile(hostfile: Path | None, np: int | None, min_np: int, spares: int) -> None:
    from hvd_elastic.hosts.hostfile import parse_hostfile

    if hostfile is None:
        return
    slots = parse_hostfile(hostfile).slots
    wanted = max(min_np, np or 0)
    if wanted <= slots < wanted + spares:
        raise UsageError(
            f"--spares {spares} beside {count(wanted, 'process')} needs "
            f"{count(wanted + spares, 'slot')}, and {hostfile} has {slots}. Lower one of them, or "
            "add hosts or slots to the hostfile."
        )
    if wanted > slots:
        flag = "--np" if np == wanted else "--min-np"
        raise UsageError(
            f"{flag} {wanted} is above the {count(slots, 'slot')} of {hostfile}. Lower it, "
            "or add hosts or slots to the hostfile."
        )


def _pinned(names: str | None, hostfile: Path | None) -> list[Host]:
    from hvd_elastic.hosts.hostfile import expand_hosts, parse_hostfile

    if names is None:
        return []
    if hostfile is None:
        raise UsageError("--pin-hosts names hosts of a hostfile; give one with --hostfile")
    hosts = parse_hostfile(hostfile)
    found: dict[str, Host] = {}
    try:
        wanted = expand_hosts(names)
    except HostfileError as error:
        raise UsageError(f"--pin-hosts: {error}") from error
    for name in wanted:
        host = hosts.get(name)
        if host is None:
            raise UsageError(
                f"--pin-hosts: host '{name}' is not in {hostfile}; it has "
                f"{', '.join(hosts.names[:8])}{', …' if len(hosts) > 8 else ''}"
            )
        found[host.name] = host
    return list(found.values())


def _check_pinned(
    names: str | None, hostfile: Path | None, np: int | None, max_np: int | None
) -> None:
    slots = sum(host.slots for host in _pinned(names, hostfile))
    for flag, limit in (("--np", np), ("--max-np", max_np)):
        if limit is not None and limit < slots:
            raise UsageError(
                f"{flag} {limit} is below the {count(slots, 'slot')} of the hosts that --pin-hosts "
                f"{names} keeps as a whole. Raise it to {slots}, or pin fewer hosts."
            )


def _check_scaling(
    scaling: ScalingOptions,
    hostfile: Path | None,
    np: int | None,
    min_np: int,
    pin_hosts: str | None,
    mpi: bool,
) -> None:
    try:
        pinned = _pinned(pin_hosts, hostfile)
    except HvdElasticError:
        pinned = []  # what is wrong with them is said already
    scaling.check(hostfile, mpi, min_np=min_np, pinned=pinned, np=np)


def _check_sizes(np: int | None, min_np: int, max_np: int | None, mpi: bool) -> None:
    if mpi and (min_np != 1 or max_np is not None):
        raise UsageError(_MPI_AND_ELASTIC)
    for wider, narrower, names in (
        (max_np, min_np, "--min-np {1} is above --max-np {0}"),
        (np, min_np, "--min-np {1} is above --np {0}"),
        (max_np, np, "--np {1} is above --max-np {0}"),
    ):
        if wider is not None and narrower is not None and narrower > wider:
            raise UsageError(names.format(wider, narrower))


def _check_mpi(mpi: bool, pin_hosts: str | None, preemption_command: str | None) -> None:
    for flag, value in (("--pin-hosts", pin_hosts), ("--preemption-command", preemption_command)):
        if mpi and value is not None:
            raise UsageError(f"a job under --mpi keeps its hosts to the end: leave {flag} out")


def _check_preemption_command(command: str | None) -> None:
    if command is not None and not command.strip():
        raise UsageError(
            "--preemption-command is empty, and what does nothing says with its exit status 0 that "
            "the host goes: give a command, or leave it out"
        )


def _check_patience(failure_timeout: float) -> None:
    from hvd_elastic.leader.spec import SHORTEST_HEARTBEAT_S

    least = 2 * SHORTEST_HEARTBEAT_S
    if failure_timeout < least:
        raise UsageError(
            f"--failure-timeout {failure_timeout:g} is below two heartbeats, which come every "
            f"{SHORTEST_HEARTBEAT_S:g} s at the most often. Give at least {least:g}; a few seconds "
            "forgive a busy network."
        )


def _check_policy(policy: str) -> None:
    if policy not in _POLICIES:
        raise UsageError(f"--policy {policy!r} is not known; valid: {', '.join(_POLICIES)}")


def _check_tensorboard(wanted: bool, *, mpi: bool) -> None:
    from hvd_elastic.records.tensorboard import check_tensorboard

    if not wanted:
        return
    if mpi:
        raise UsageError(
            "a job under --mpi has no leader to write for TensorBoard: leave --tensorboard out and "
            "set HVD_ELASTIC_RUN_FOLDER and HVD_ELASTIC_TENSORBOARD=1, for rank 0 to do it"
        )
    check_tensorboard("--tensorboard")


def _check_ssh_config(ssh_config: Path | None) -> None:
    if ssh_config is not None and not ssh_config.expanduser().is_file():
        raise UsageError(
            f"--ssh-config {ssh_config}: no such file; name an ssh configuration, or leave it out "
            "to use ~/.ssh/config"
        )


def _checkpoint_folder(place: str | None) -> str | None:
    from hvd_elastic.checkpoint.url import is_url

    if place is None or is_url(place):
        return place
    return str(Path(place).absolute())


def _check_command(command: list[str] | None) -> None:
    """Refuse what cannot start anywhere, before any host is touched."""
    if not command:
        raise UsageError(
            "no training command. Give it after --, for example: hvd-elastic run -- python train.py"
        )
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"the command {command[0]!r} is not on PATH. Give the training command after --, for "
            "example: hvd-elastic run -- python train.py"
        )
    for argument in command[1:]:
        if not argument.startswith("-"):
            # Only a script that an interpreter is given first is surely meant as a file.
            is_script = "python" in Path(command[0]).name and argument.endswith(".py")
            if is_script and not Path(argument).is_file():
                raise UsageError(f"the training script {argument} does not exist in {Path.cwd()}")
            return


def _folder_to_resume(run_id: str, hostfile: Path | None, ssh_config: Path | None) -> RunFolder:
    """The run's folder; where another machine led it, a new one, of what its hosts know of it."""
    from hvd_elastic.config import runs_folder
    from hvd_elastic.records.run_folder import RunFolder, check_run_id

    if (runs_folder() / check_run_id(run_id)).is_dir():
        return RunFolder.open(run_id)
    if hostfile is None:
        try:
            return RunFolder.open(run_id)
        except RunError as error:
            raise RunError(
                f"{error}\nIf another machine led it, which is gone, its hosts know it: "
                f"hvd-elastic run --resume {run_id} --hostfile HOSTFILE"
            ) from error
    from dataclasses import replace

    from hvd_elastic.hosts.hostfile import parse_hostfile
    from hvd_elastic.hosts.ssh import SshOptions
    from hvd_elastic.leader.recovery import WHAT_IS_TRUSTED, find_run

    config = _ssh_config_for(hostfile, ssh_config)
    options = SshOptions(config_path=None if config is None else Path(config))
    spec = find_run(run_id, list(parse_hostfile(hostfile)), options)
    print(f"run {run_id} was led by another machine. What its hosts say of it:", file=sys.stderr)
    for name in WHAT_IS_TRUSTED:
        value = getattr(spec, name)
        if value is not None:
            # As Python writes it: it may hold anything, sequences that a terminal obeys included.
            print(f"  {name}: {list(value) if name == 'command' else value!r}", file=sys.stderr)
    _check_folder_is_here(spec, run_id)
    # The others are paths of that machine's own.
    spec = replace(spec, hostfile=str(hostfile.absolute()), ssh_config=config)
    return RunFolder.create(run_id, {**spec.as_dict(), "began_elsewhere": True})


def _check_not_complete(folder: RunFolder) -> None:
    from hvd_elastic.records.summary import summarize

    if summarize(folder.read_events()).status == "succeeded":
        raise RunError(
            f"run {folder.run_id} has finished: there is nothing to resume. Look at it with: "
            f"hvd-elastic report {folder.run_id}"
        )


def _check_resume_options(context: typer.Context) -> None:
    """Refuse options that a resumed run takes from its start, instead of ignoring them."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            if parameter.name not in _WITH_RESUME:
                raise UsageError(
                    f"{parameter.opts[0]} cannot be given with --resume: the run keeps what it was "
                    "started with. Valid beside --resume: --hostfile, --ssh-config, --np, "
                    "--max-np, --detach, --json."
                )


def _resumed_spec(
    folder: RunFolder,
    command: list[str] | None,
    hostfile: Path | None,
    ssh_config: Path | None,
    np: int | None,
    max_np: int | None,
) -> RunSpec:
    from dataclasses import replace

    from hvd_elastic.leader.spec import RunSpec

    if command:
        raise UsageError(
            f"--resume {folder.run_id} runs the command it was started with; leave it out"
        )
    spec = RunSpec.from_dict(folder.read_run(), folder.run_id)
    changes: dict[str, Any] = {}
    if hostfile is not None:
        changes["hostfile"] = str(hostfile.absolute())
    changes["ssh_config"] = _ssh_config_for(hostfile, ssh_config) or spec.ssh_config
    if np is not None:
        changes |= {"np": np, "slots": max(np, spec.slots)}
    if max_np is not None:
        changes["max_np"] = max_np
    spec = replace(spec, **changes)
    _raise_together(
        lambda: _check_sizes(spec.np, spec.min_np, spec.max_np, mpi=False),
        # It may have been edited since the run began, and hosts may come yet: only what is asked
        # for now has to be possible.
        lambda: _check_hostfile(
            spec.hostfile_path if np is not None or hostfile is not None else None,
            np,
            spec.min_np,
            spec.spares if np is not None else 0,
        ),
    )
    _check_tensorboard(spec.tensorboard, mpi=False)
    _check_folder_is_here(spec, folder.run_id)
    return spec


def _check_folder_is_here(spec: RunSpec, run_id: str) -> None:
    if not Path(spec.cwd).is_dir():
        raise RunError(
            f"run {run_id} was started in the folder {spec.cwd!r}, which is not on this machine"
        )


def _lead(
    spec: RunSpec,
    folder: RunFolder,
    *,
    resumed: bool,
    json_output: bool,
    forget: bool = False,
    on_start: Callable[[], None] = lambda: None,
) -> int:
    """Lead a run to its end.

    Args:
        forget: remove the folder where another leader leads the run, and this one began nothing.
        on_start: called with each event; with the first one, the run has begun.

    Returns:
        The exit status.
    """
    import json
    import time

    from hvd_elastic.leader.leader import Leader
    from hvd_elastic.leader.spec import forwarded_environment
    from hvd_elastic.records.tensorboard import TensorBoardWriter
    from hvd_elastic.views.terminal import LastingView, unless_nobody_reads

    def warn(message: str) -> None:
        show_event({"t": time.time(), "kind": "warning", "message": message})

    with (
        folder.take_lead(),
        LastingView(live=False if json_output else None) as view,
        TensorBoardWriter(folder.tensorboard, warn) as board,
    ):

        def show_event(event: Any) -> None:
            on_start()
            if json_output:
                with unless_nobody_reads():
                    print(json.dumps(event), flush=True)
            else:
                view.show(event)
            if spec.tensorboard:
                board.note(event)

        def show_output(host: str, slot: int, line: str) -> None:
            if not json_output:
                view.print(f"[{host}:{slot}] {line}")

        leader = Leader(
            spec,
            folder,
            forwarded_environment(os.environ),
            show_event,
            show_output,
            resumed=resumed,
        )
        finish = leader.run()
    if finish.status == "failed" and any(folder.logs.iterdir()):
        print(f"logs of the workers: {folder.logs}", file=sys.stderr)
    if leader.gave_way and forget:
        shutil.rmtree(folder.path, ignore_errors=True)
    return {"succeeded": 0, "stopped": 130}.get(finish.status, 1)


_STARTED = b"started"


def _await_leader(child: int, answer: int, folder: RunFolder) -> None:
    """Wait until a leader that was forked has begun the run, or said why it cannot."""
    with open(answer, "rb") as told:
        try:
            said = told.read()
        except KeyboardInterrupt:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGINT)
            raise
    if said == _STARTED:
        print(folder.run_id)
        print(
            f"running in the background: hvd-elastic attach {folder.run_id}, "
            f"hvd-elastic stop {folder.run_id}",
            file=sys.stderr,
        )
        return
    status, _, text = said.decode(errors="replace").partition(" ")
    if not text:
        status, text = "1", f"error: the leader ended before it began; see {folder.leader_log}"
    print(text, file=sys.stderr)
    raise typer.Exit(int(status))


def _lead_in_background(spec: RunSpec, folder: RunFolder, *, resumed: bool) -> None:
    """Fork a leader that outlives this terminal; its output goes to leader.log.

    Raises:
        typer.Exit: it could not begin, which was said here.
    """
    sys.stdout.flush()
    answer, to_terminal = os.pipe()
    child = os.fork()
    if child:
        os.close(to_terminal)
        _await_leader(child, answer, folder)
        return
    os.close(answer)
    os.setsid()
    log = os.open(folder.leader_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.pop("COLUMNS", None)
    started = False

    def tell(text: bytes) -> None:
        with contextlib.suppress(OSError):  # Ctrl-C: nobody waits for it any more
            os.write(to_terminal, text)
        os.close(to_terminal)

    def on_start() -> None:
        nonlocal started
        if not started:
            started = True
            tell(_STARTED)

    try:
        status = _lead(spec, folder, resumed=resumed, json_output=False, on_start=on_start)
    except HvdElasticError as error:
        status = error.exit_status
        if started:
            print(f"error: {error}", file=sys.stderr)
        else:  # the log may be that of another leader
            tell(f"{status} error: {error}".encode())
    except BaseException:  # noqa: BLE001  (a forked child must not return into its parent's code)
        import traceback

        traceback.print_exc()
        status = 1
    os._exit(status)
