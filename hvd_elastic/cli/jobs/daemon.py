"""Implement ``hvd-elastic up``, ``down`` and ``hosts``: the daemon that shares a cluster."""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hvd_elastic.cli.jobs.units import remove_unit, write_unit
from hvd_elastic.cli.options import (
    AsJson,
    SshConfigOption,
    argument,
    command,
    option,
    parse_duration,
)
from hvd_elastic.cli.output import print_json, print_table, wait_until
from hvd_elastic.errors import HostfileError, RunError, UsageError

if TYPE_CHECKING:
    from hvd_elastic.jobs.hosts import Expansion
    from hvd_elastic.jobs.job import Answer
    from hvd_elastic.jobs.place import ClusterFolder

_LONGEST_REASON = 200
"""Characters of the reason of a drain, which stands in the table of the hosts."""

ClusterOption = Annotated[
    str | None,
    option("name of the cluster, if several", "--cluster", "-c", envvar="HVD_ELASTIC_CLUSTER"),
]


def notify_held_s(command: str | None, held: str | None) -> float | None:
    """Return the value of ``--notify-held`` [s].

    Raises:
        UsageError: it is not valid, or does not fit ``--notify``.
    """
    if command is not None and not command.strip():
        raise UsageError("--notify is empty: give a shell command, such as 'cat >> events'")
    if command is None and held is not None:
        raise UsageError("--notify-held sets when --notify runs: give --notify COMMAND too")
    return None if held is None else parse_duration("--notify-held", held)


@dataclass(frozen=True)
class UpOptions:
    """The options of ``up``."""

    hostfile: Annotated[Path | None, argument("hosts and their slots", "HOSTFILE")] = None
    cloud: Annotated[
        str | None,
        option(
            "instead of a hostfile: machines of this cloud, as the jobs need them (see: "
            "hvd-elastic cloud up)",
            metavar="NAME",
        ),
    ] = None
    name: Annotated[
        str | None, option("name of the cluster (default: of the hostfile)", "--name")
    ] = None
    detach: Annotated[
        bool, option("run in the background; see down and hosts", "--detach", "-d")
    ] = False
    policy: Annotated[str, option("who gets how many slots: goodput, equal (shares), or fifo")] = (
        "goodput"
    )
    pause: Annotated[
        bool | None,
        option(
            "start no job until up --no-pause, also of a cluster that is up", "--pause/--no-pause"
        ),
    ] = None
    notify: Annotated[
        str | None,
        option("run for events, with each as JSON on its input", "--notify", metavar="COMMAND"),
    ] = None
    drain_unhealthy: Annotated[
        str | None,
        option(
            "drain hosts whose hardware has faults: failed, or warning (also those that may fail)",
            "--drain-unhealthy",
            metavar="LEVEL",
        ),
    ] = None
    notify_held: Annotated[
        str | None,
        option("also report jobs held for, such as 1d", "--notify-held", metavar="TIME"),
    ] = None
    group: Annotated[
        str | None, option("group whose members may use the cluster; needs --place", "--group")
    ] = None
    place: Annotated[
        Path | None, option("folder of a cluster that a group shares", "--place", metavar="FOLDER")
    ] = None
    operators: Annotated[
        str | None,
        option("users who may change all jobs, such as ada,grace", "--operators", metavar="USERS"),
    ] = None
    ssh_config: SshConfigOption = None
    as_json: AsJson = False

    def check(self) -> None:
        """Raise UsageError for values that are not valid, and options that do not fit together."""
        from hvd_elastic.cli.runs.run_options import check_ssh_config
        from hvd_elastic.policy.schedule.policies import POLICIES

        check_ssh_config(self.ssh_config)
        notify_held_s(self.notify, self.notify_held)
        shared = self.place is not None
        name, level = self.place and self.place.name, self.drain_unhealthy
        refused = {
            f"--policy {self.policy!r} is not known; valid: {', '.join(POLICIES)}": (
                self.policy not in POLICIES
            ),
            f"--drain-unhealthy is failed or warning, not {level!r}": (
                level not in (None, "failed", "warning")
            ),
            "--drain-unhealthy is not for a cluster that a group shares, since members' runs could "
            "make faults up. hvd-elastic hosts shows them, and --notify reports them": (
                shared and level is not None
            ),
            "name the hosts of the cluster: hvd-elastic up HOSTFILE, or --cloud NAME": (
                (self.hostfile is None) == (self.cloud is None)
            ),
            "--cloud is not for a cluster that a group shares: leave it out": (
                shared and self.cloud is not None
            ),
            "a group shares a cluster in a folder: give --group and --place": (
                (self.group is None) == shared
            ),
            f"--name is the last part of --place, {name}: leave it out": (
                shared and self.name not in (None, name)
            ),
            "--operators is for a cluster that a group shares, with --group, --place": (
                self.operators is not None and not shared
            ),
        }
        for why in (why for why, is_wrong in refused.items() if is_wrong):
            raise UsageError(why)

    def hosts(self) -> tuple[Path, str | None]:
        """Return the hostfile and the ssh configuration.

        Raises:
            HostfileError: the hostfile cannot be used.
            RunError: this computer knows no such cloud.
        """
        from hvd_elastic.hosts.hostfile import parse_hostfile
        from hvd_elastic.hosts.ssh_config import ssh_config_for

        if self.hostfile is not None:
            parse_hostfile(self.hostfile)  # an error is told before anything is made
            return self.hostfile, ssh_config_for(self.hostfile, self.ssh_config)
        from hvd_elastic.engines.cloud.records import CloudFolder

        cloud = CloudFolder.open(self.cloud or "")
        hostfile, config = cloud.path / "cluster_hosts", cloud.read().ssh_config
        own = None if config is None else Path(config)
        return hostfile, ssh_config_for(hostfile, self.ssh_config or own)

    def cluster_folder(self, hostfile: Path) -> ClusterFolder:
        """Return the folder of the cluster, which is made if there is none.

        Raises:
            HvdElasticError: it cannot be made, or another cluster that is up has one of the hosts.
        """
        from hvd_elastic.jobs.place import ClusterFolder, name_of_hostfile

        named = self.name or self.cloud or name_of_hostfile(hostfile)
        name = named if self.place is None else self.place.name
        if self.cloud is None:  # before it has a folder, which would count as a cluster
            _refuse_shared_hosts(name, hostfile)
        if self.place is None or self.group is None:
            return ClusterFolder.create(name)
        return ClusterFolder.create_shared(self.place, self.group)

    def unit_command(self, hostfile: Path, place: ClusterFolder, config: str | None) -> list[str]:
        """Return the command that starts the daemon of a shared cluster again."""
        words = [sys.executable, "-m", "hvd_elastic.cli.app", "up", str(hostfile.absolute())]
        for name, value in {
            "group": self.group,
            "place": str(place.path),
            "policy": self.policy,
            "operators": self.operators,
            "notify": self.notify,
            "notify-held": self.notify_held,
            "ssh-config": config,
        }.items():
            words += [f"--{name}", value] if value else []
        return words


@command(UpOptions)
def up(options: UpOptions) -> None:
    """Share a cluster between jobs: start the daemon that decides which job holds which slots.

    It ends with Ctrl-C or [bold]hvd-elastic down[/bold]. Jobs continue while it is not there, and
    the next daemon takes them up.

    Examples:
      hvd-elastic up hosts --detach

      hvd-elastic up --cloud lab --detach

      hvd-elastic up hosts --group vision --place /srv/queue

      hvd-elastic submit -- python train.py

      hvd-elastic queue
    """
    from hvd_elastic.jobs.job import Pause
    from hvd_elastic.jobs.operator_state import OperatorState
    from hvd_elastic.jobs.place import ClusterFolder
    from hvd_elastic.jobs.rights import user_id
    from hvd_elastic.jobs.server import ask_daemon

    options.check()
    hostfile, config = options.hosts()
    operators = [user_id(each) for each in (options.operators or "").split(",") if each]
    pause = None if options.pause is None else Pause(getpass.getuser() if options.pause else "")
    if pause is not None and options.place is not None:
        theirs = ClusterFolder(options.place.absolute(), shared=True)
        if theirs.is_others:  # an operator asks for it
            _answer(ask_daemon(theirs, pause), options.as_json)
            return
    folder = options.cluster_folder(hostfile)
    if pause is not None:
        if folder.daemon_alive():
            _answer(ask_daemon(folder, pause), options.as_json)
            return
        OperatorState(folder.operator_state).pause(pause.by)
    serve = functools.partial(_serve, folder, hostfile, config, operators, options)
    on_up = functools.partial(_tell_up, folder, hostfile, options.as_json)
    if not options.detach:
        serve(on_up)
        return
    from hvd_elastic.cli.runs.run import begin_in_background

    begin_in_background("daemon", folder.log, serve)
    on_up()
    if options.group is not None:
        write_unit(folder, "daemon", options.unit_command(hostfile, folder, config))


def _serve(
    place: ClusterFolder,
    hostfile: Path,
    config: str | None,
    operators: Collection[int],
    options: UpOptions,
    on_up: Callable[[], None],
) -> int:
    """Be the daemon until it is to end; ``on_up`` is called when it serves."""
    from hvd_elastic.cli.runs.run import begin_leader
    from hvd_elastic.jobs.daemon import Daemon
    from hvd_elastic.policy.schedule.policies import POLICIES

    with place.lock(), _machines(place, options.cloud, hostfile):
        _refuse_shared_hosts(place.name, hostfile)
        hostfile = hostfile.absolute()
        daemon = Daemon(
            *(place, hostfile, config, begin_leader, POLICIES[options.policy], operators),
            notify=options.notify or "",
            drains=options.drain_unhealthy or "",
            notify_held_s=notify_held_s(options.notify, options.notify_held),
            expansion=_expansion(options.cloud),
        )
        place.describe_daemon(hostfile)
        on_up()
        daemon.run()
    return 0


def _expansion(cloud: str | None) -> Expansion:
    """Return what a cluster on a cloud may grow to."""
    from hvd_elastic.jobs.hosts import Expansion

    if cloud is None:
        return Expansion()
    from hvd_elastic.engines.cloud.engine import CloudSource

    source = CloudSource(cloud)
    return Expansion(source.hosts({}).hosts, source.preemption)


def _machines(
    place: ClusterFolder, cloud: str | None, hostfile: Path
) -> contextlib.AbstractContextManager[None]:
    """Have the cluster ask for machines of a cloud, if it is on one."""
    if cloud is None:
        return contextlib.nullcontext()
    from hvd_elastic.engines.cloud.cluster import cloud_cluster
    from hvd_elastic.engines.cloud.records import CloudFolder

    def tell(text: str) -> None:
        print(f"cloud: {text}", file=sys.stderr, flush=True)

    return cloud_cluster(place, CloudFolder.open(cloud), hostfile, tell)


def _refuse_shared_hosts(name: str, hostfile: Path) -> None:
    """Raise RunError if another cluster that is up has one of the hosts."""
    from hvd_elastic.hosts.hostfile import parse_hostfile
    from hvd_elastic.jobs.job import Hosts
    from hvd_elastic.jobs.place import list_clusters
    from hvd_elastic.jobs.server import ask_daemon

    own = {host.name.lower() for host in parse_hostfile(hostfile).hosts}
    for other in list_clusters():
        if other.name == name or not other.daemon_alive():
            continue
        with contextlib.suppress(HostfileError):  # it is being edited
            if other.is_others:
                theirs = [row["host"] for row in ask_daemon(other, Hosts()).data]
            else:
                theirs = [*parse_hostfile(other.daemon().get("hostfile", "")).names]
            common = sorted(name for name in theirs if name.lower() in own)
            if common:
                raise RunError(
                    f"cluster {other.name}, which is up, has host {common[0]} too, and each of the "
                    f"two would give its slots away. Use that one (--cluster {other.name}), end it "
                    f"(hvd-elastic down --cluster {other.name}), or take its hosts out of "
                    f"{hostfile}"
                )


def _tell_up(place: ClusterFolder, hostfile: Path, as_json: bool) -> None:
    from hvd_elastic.jobs.operator_state import OperatorState

    if as_json:
        told = {"cluster": place.name, **place.daemon(), "folder": str(place.path)}
        print(json.dumps(told), flush=True)
        return
    print(f"cluster {place.name} is up, with the hosts of hostfile {hostfile}", flush=True)
    if by := OperatorState(place.operator_state).paused_by:
        print(
            f"{by} has paused it, so no job is started: hvd-elastic up {hostfile} --no-pause "
            "ends that",
            file=sys.stderr,
            flush=True,
        )
    if place.shared:
        print(f"its group finds it with: export HVD_ELASTIC_CLUSTER={place.path}", file=sys.stderr)
    print(
        "submit jobs with: hvd-elastic submit -- python train.py   see them with: hvd-elastic "
        "queue",
        file=sys.stderr,
        flush=True,
    )


def down(
    leave_jobs: Annotated[
        bool, option("end the daemon only; its jobs continue", "--leave-jobs")
    ] = False,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """End the daemon of a cluster; its jobs end after a checkpoint and continue at the next up.

    A plain command has no checkpoint, and starts from its beginning then.

    Examples:
      hvd-elastic down

      hvd-elastic down --leave-jobs
    """
    from hvd_elastic.jobs.job import Down
    from hvd_elastic.jobs.place import open_cluster
    from hvd_elastic.jobs.server import ask_daemon

    place = open_cluster(cluster)
    answer = ask_daemon(place, Down(leave_jobs))
    remove_unit(place, "daemon")
    if not as_json:
        print(answer.message, flush=True)
    wait_until(
        lambda: not place.daemon_alive(),
        f"the daemon of cluster {place.name} waits for its jobs, which may have large checkpoints "
        f"to write. Ctrl-C ends the waiting alone; see: hvd-elastic queue --cluster {place.name}",
    )
    if as_json:
        print(json.dumps({"ok": True, "message": answer.message, "jobs": answer.jobs}))


def hosts(cluster: ClusterOption = None, as_json: AsJson = False) -> None:
    """Show the hosts of a cluster, and which job holds which slots.

    Examples:
      hvd-elastic hosts

      hvd-elastic hosts --json
    """
    from hvd_elastic.jobs.job import Hosts
    from hvd_elastic.jobs.operator_state import OperatorState
    from hvd_elastic.jobs.place import open_cluster
    from hvd_elastic.jobs.server import ask_daemon

    place = open_cluster(cluster)
    is_up = place.daemon_alive()
    if is_up or place.is_others:
        rows = ask_daemon(place, Hosts()).data
    else:
        from hvd_elastic.jobs.hosts import rows_without_daemon

        rows = rows_without_daemon(place)
    if not place.is_others and not as_json:
        if by := OperatorState(place.operator_state).paused_by:
            print(f"cluster {place.name} starts no job: {by} has paused it", file=sys.stderr)
    if not is_up and not as_json:
        warn_of_no_daemon(place)
    if as_json:
        print_json(rows)
        return
    cells = [
        [row["host"], row["state"], str(row["slots"]), str(row["free"]), _jobs_on(row)]
        for row in rows
    ]
    print_table([["HOST", "STATE", "SLOTS", "FREE", "JOBS"], *cells], left={0, 1, 4})


def drain_host(
    host: str, reason: str, at: float | None, cluster: str | None, wait: bool, as_json: bool
) -> None:
    """Have all jobs of a cluster leave a host, and keep them off it until it is given back.

    Args:
        at: from when on [Unix s]; None: at once.
        wait: whether to wait until nothing of a job is left there.
    """
    from hvd_elastic.jobs.job import DrainHost, Hosts
    from hvd_elastic.jobs.place import open_cluster
    from hvd_elastic.jobs.server import ask_daemon

    if not reason.strip() or not reason.isprintable() or len(reason) > _LONGEST_REASON:
        shown = repr(reason if len(reason) <= _LONGEST_REASON else f"{reason[:40]}…")
        raise UsageError(
            f"--reason {shown} is not valid: it is one line of text of at most {_LONGEST_REASON} "
            "characters, shown beside the host"
        )
    place = open_cluster(cluster)
    asked = DrainHost(host, reason.strip(), getpass.getuser(), time.time() if at is None else at)
    answer = ask_daemon(place, asked)

    def is_drained() -> bool:
        rows = ask_daemon(place, Hosts()).data
        states = [row["state"] for row in rows if row["host"] == answer.data]
        if states and states[0] not in ("drained", "leaving"):
            raise RunError(f"host {answer.data} was given back meanwhile, so it is not drained")
        return states != ["leaving"]

    if not as_json:
        print(answer.message, flush=True)
    if wait and at is None:
        wait_until(
            is_drained,
            f"jobs still have slots of host {answer.data}; a plain command keeps its slot until it "
            "ends. Ctrl-C ends the waiting alone; see: hvd-elastic hosts",
        )
    if as_json:
        _answer(answer, as_json)


def undrain(
    host: Annotated[str, argument("a host that is drained", "HOST")],
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Give a host of the cluster back to the jobs after hvd-elastic drain.

    Examples:
      hvd-elastic undrain gpu3
    """
    from hvd_elastic.jobs.job import UndrainHost
    from hvd_elastic.jobs.place import open_cluster
    from hvd_elastic.jobs.server import ask_daemon

    place = open_cluster(cluster)
    _answer(ask_daemon(place, UndrainHost(host, getpass.getuser())), as_json)


def _answer(answer: Answer, as_json: bool) -> None:
    print(json.dumps({"ok": True, "message": answer.message}) if as_json else answer.message)


def warn_of_no_daemon(place: ClusterFolder) -> None:
    """Print that nothing is decided, since the cluster has no daemon."""
    print(
        f"cluster {place.name} has no daemon; running jobs continue, none is started. Start it "
        f"with: hvd-elastic up {place.daemon().get('hostfile', 'HOSTFILE')}",
        file=sys.stderr,
    )


def _jobs_on(row: Mapping[str, Any]) -> str:
    """Return who holds slots of a host, who still occupies some, and what is the matter with it."""
    told = []
    for run_id in {**row["jobs"], **row["occupied"]}:
        held = row["jobs"].get(run_id, 0)
        more = row["occupied"].get(run_id, 0) - held
        slots = [str(held)] if held else []
        slots += [f"{more} leaving"] if more > 0 else []
        told.append(f"{run_id}: {' and '.join(slots)}")
    return "; ".join(part for part in (", ".join(told), row["cause"]) if part)
