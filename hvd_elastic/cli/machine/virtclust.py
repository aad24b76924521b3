"""Implement ``virtclust``, a private cluster on one machine whose hosts fail, and the demo."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
import typer.main

from hvd_elastic.cli.entry import enter
from hvd_elastic.cli.options import (
    AsJson,
    number_option,
    option,
    parse_whole_number,
    whole_number_option,
)
from hvd_elastic.errors import HvdElasticError, UsageError
from hvd_elastic.formatting import count, duration_words, unfiltered
from hvd_elastic.frameworks import TORCH_REQUIREMENT
from hvd_elastic.hosts.hostfile import parse_hostfile
from hvd_elastic.virtual import VirtualCluster
from hvd_elastic.virtual.plan import parse_shape
from hvd_elastic.virtual.processes import find_tool

_CONTEXT = {"help_option_names": ["-h", "--help"]}
_NAME = typer.Option(
    None, "--name", "-n", help="name of the cluster; not needed if there is one only"
)
_SHARE = typer.Option(
    [], help="file or folder under /tmp, /data or /run that the hosts see; may be repeated"
)
_Cpus = Annotated[
    float | None, number_option("CPU cores each host may use, such as 0.5", "--cpus", least=0.01)
]
_COPY = typer.Option(None, help="write a second copy of the hostfile here")
_COMMAND = typer.Argument(
    None, metavar="[-- COMMAND…]", help="one word is a shell line; none is a login shell"
)
_HowMany = Annotated[
    int,
    typer.Argument(
        metavar="N", parser=lambda text: parse_whole_number("N", text), help="number of hosts"
    ),
]
_HOST = typer.Argument(..., metavar="HOST", help="host such as vc1-2, or its number")
_HOSTS = typer.Argument(
    ..., metavar="HOST", help="host such as vc1-2, its number, or @LABEL of the hostfile"
)


app = typer.Typer(
    help=(
        "A private cluster on this machine: hosts with their own network, sshd, host name, "
        "processes, /data and /tmp.\n\n"
        "Needs root; without, hosts are addresses of the loopback interface with an sshd each "
        "(they share files and processes, and cables cannot be cut)."
    ),
    epilog=(
        "Example: virtclust up 3x2 --rate 1gbit; virtclust run vc1-1 -- hostname; "
        "virtclust crash vc1-2; virtclust boot vc1-2; virtclust down\n\n"
        "A command's own help: virtclust COMMAND --help"
    ),
    add_completion=False,
    no_args_is_help=True,
    context_settings=_CONTEXT,
)


def _say(as_json: bool, record: dict[str, Any], *lines: str) -> None:
    print(json.dumps(record) if as_json else "\n".join(lines))


def _describe(cluster: VirtualCluster) -> dict[str, Any]:
    state = cluster.state
    return {
        "name": cluster.name,
        "backend": state.backend,
        "slots": state.slots,
        "subnet": state.subnet,
        "leader_address": cluster.leader_address,
        "rate_bits_per_s": state.rate_bits_per_s,
        "cpus": state.cpus,
        "hosts": [
            {
                "name": host.name,
                "address": host.address,
                "port": host.port,
                "status": cluster.status(host.name),
            }
            for host in state.hosts
        ],
        "hostfile": str(cluster.hostfile),
        "ssh_config": str(cluster.ssh_config),
        "users": list(state.users),
    }


def _host_lines(record: dict[str, Any]) -> list[str]:
    width = max((len(host["name"]) for host in record["hosts"]), default=0)
    return [
        f"  {host['name']:<{width}}  {host['status']:<4} {host['address']}"
        + ("" if host["port"] == 22 else f" port {host['port']}")
        for host in record["hosts"]
    ]


def _kind(record: dict[str, Any]) -> str:
    where = "in network namespaces" if record["backend"] == "netns" else "on the loopback interface"
    return (
        f"{count(len(record['hosts']), 'host')} of {count(record['slots'], 'slot')} {where}, "
        f"{record['subnet']}"
    )


@app.command(
    epilog="Examples: virtclust up 3x2    virtclust up 8x1 --name big --rate 1gbit --cpus 1"
)
def up(
    shape: str = typer.Argument(
        ..., metavar="HOSTSxSLOTS", help="number of hosts and of slots on each, such as 3x2"
    ),
    name: str | None = typer.Option(
        None,
        "--name",
        "-n",
        help="name of the cluster, whose hosts are NAME-1, NAME-2, … (default: vc1, vc2, …)",
    ),
    rate: str | None = typer.Option(
        None, help="rate of each host's link in each direction: 1gbit, 200mbit"
    ),
    cpus: _Cpus = None,
    loopback: bool = typer.Option(
        False, "--loopback", help="use addresses of 127/8 instead of namespaces, even with root"
    ),
    share: list[Path] = _SHARE,
    hostfile: Path | None = _COPY,
    users: str | None = typer.Option(
        None, help="accounts to make on this machine, such as ada,grace; down removes them"
    ),
    as_json: AsJson = False,
) -> None:
    """Make a cluster and write its hostfile and ssh configuration.

    Hosts see this machine's files, except that /data, /tmp and /run are their own.
    """
    wanted = parse_shape(shape)
    begun = time.monotonic()
    cluster = VirtualCluster.up(
        wanted.hosts,
        wanted.slots,
        name=name,
        rate=rate,
        loopback=True if loopback else None,
        cpus=cpus,
        shares=share,
        hostfile=hostfile,
        users=[] if users is None else users.split(","),
    )
    seconds = time.monotonic() - begun
    record = {**_describe(cluster), "seconds": round(seconds, 3)}
    notes = []
    if record["backend"] == "loopback" and not loopback:
        notes.append("no root here: files and processes are shared, cables cannot be cut")
    config, listed = shlex.quote(record["ssh_config"]), shlex.quote(record["hostfile"])
    _say(
        as_json,
        record,
        f"cluster {cluster.name}: {_kind(record)}, up in {duration_words(seconds)}",
        *notes,
        *_host_lines(record),
        f"hostfile    {record['hostfile']}",
        f"ssh config  {record['ssh_config']}",
        f"log in      virtclust run {record['hosts'][0]['name']}   or   "
        f"ssh -F {config} {record['hosts'][0]['name']}",
        f"train       hvd-elastic run -H {listed} -F {config} -- python train.py",
        *(f"account     su - {user} -c 'ssh {cluster.hosts[0]}'" for user in cluster.users),
        f"end it      virtclust down --name {cluster.name}",
    )


@app.command(epilog="Examples: virtclust down    virtclust down --name vc2    virtclust down --all")
def down(
    name: str | None = _NAME,
    every: bool = typer.Option(False, "--all", help="end all clusters of this user"),
    as_json: AsJson = False,
) -> None:
    """End a cluster and leave nothing behind, also after a crash or a killed virtclust."""
    if every and name is not None:
        raise UsageError("--all and --name exclude each other; leave one out")
    if every:
        clusters = VirtualCluster.every()
    elif name is None and not VirtualCluster.every():
        clusters = []
    else:
        known = [cluster for cluster in VirtualCluster.every() if cluster.name == name]
        clusters = known or [VirtualCluster.find(name)]
    for cluster in clusters:
        cluster.down()
    names = [cluster.name for cluster in clusters]
    _say(as_json, {"down": names}, f"down: {', '.join(names) or 'there was no cluster'}")


def _act(
    host: str,
    name: str | None,
    action: Callable[[VirtualCluster, str], object],
    done: str,
    as_json: bool,
) -> None:
    if host.startswith("@"):
        cluster = VirtualCluster.find(name)
        names = [each.name for each in parse_hostfile(cluster.hostfile).choose(host)]
    else:
        cluster, full_name = VirtualCluster.find_host(host, name)
        names = [full_name]
    for each in names:
        action(cluster, each)
        record = {"host": each, "status": cluster.status(each)}
        _say(as_json, record, f"{each}: {done}")


@app.command(epilog="Example: virtclust cut vc1-2")
def cut(host: str = _HOSTS, name: str | None = _NAME, as_json: AsJson = False) -> None:
    """Pull a host's cable: packets are lost silently, connections stay open."""
    _act(host, name, lambda cluster, it: cluster.cut(it), "its cable is pulled", as_json)


@app.command(epilog="Example: virtclust heal vc1-2")
def heal(host: str = _HOSTS, name: str | None = _NAME, as_json: AsJson = False) -> None:
    """Plug a host's cable in again."""
    _act(host, name, lambda cluster, it: cluster.heal(it), "its cable is plugged in", as_json)


@app.command(epilog="Examples: virtclust crash vc1-2    virtclust crash vc1-2 --silent")
def crash(
    host: str = _HOSTS,
    name: str | None = _NAME,
    silent: bool = typer.Option(
        False, "--silent", help="close no connection, as when the power fails"
    ),
    as_json: AsJson = False,
) -> None:
    """Kill -9 everything on a host, its sshd included; it stays off until booted."""
    _act(host, name, lambda cluster, it: cluster.crash(it, silent=silent), "off", as_json)


@app.command(epilog="Example: virtclust boot vc1-2")
def boot(host: str = _HOSTS, name: str | None = _NAME, as_json: AsJson = False) -> None:
    """Start a crashed host again: same name, address, host key and /data; empty /tmp."""
    _act(host, name, lambda cluster, it: cluster.boot(it), "up", as_json)


@app.command(epilog="Example: virtclust add 2 --name vc1")
def add(hosts: _HowMany, name: str | None = _NAME, as_json: AsJson = False) -> None:
    """Make more hosts of the same kind; the hostfile grows by them."""
    cluster = VirtualCluster.find(name)
    names = cluster.add(hosts)
    _say(as_json, {"name": cluster.name, "added": names}, f"added: {', '.join(names)}")


@app.command(epilog="Example: hvd-elastic run --hostfile $(virtclust hostfile --path) -- …")
def hostfile(
    name: str | None = _NAME,
    path: bool = typer.Option(False, "--path", help="print its path instead"),
    as_json: AsJson = False,
) -> None:
    """Print a cluster's hostfile."""
    cluster = VirtualCluster.find(name)
    text = cluster.hostfile.read_text()
    record = {"path": str(cluster.hostfile), "ssh_config": str(cluster.ssh_config), "text": text}
    _say(as_json, record, str(cluster.hostfile) if path else text.rstrip("\n"))


@app.command("list", epilog="Example: virtclust list --json")
def list_(as_json: AsJson = False) -> None:
    """List the clusters of this user."""
    records: list[dict[str, Any]] = []
    lines: list[str] = []
    for cluster in VirtualCluster.every():
        try:
            record = _describe(cluster)
        except HvdElasticError as error:
            record = {"name": cluster.name, "error": str(error)}
            lines.append(
                f"{cluster.name}: not whole; take it down with: "
                f"virtclust down --name {cluster.name}"
            )
        else:
            lines.append(f"{cluster.name}: {_kind(record)}")
        records.append(record)
    _say(as_json, {"clusters": records}, *(lines or ["no cluster"]))


@app.command(epilog="Example: virtclust status --name vc1")
def status(name: str | None = _NAME, as_json: AsJson = False) -> None:
    """Show a cluster's hosts and their state: up, cut or off."""
    record = _describe(VirtualCluster.find(name))
    _say(
        as_json,
        record,
        f"{record['name']}: {_kind(record)}",
        *_host_lines(record),
        f"hostfile    {record['hostfile']}",
        f"ssh config  {record['ssh_config']}",
    )


@app.command(
    context_settings={**_CONTEXT, "allow_interspersed_args": False},
    epilog="Examples: virtclust run vc1-1 -- df -h /data    virtclust run vc1-1   (a login shell)",
)
def run(host: str = _HOST, command: list[str] = _COMMAND, name: str | None = _NAME) -> None:
    """Run a command on a host through ssh; its exit status is the command's."""
    cluster, full_name = VirtualCluster.find_host(host, name)
    words = list(command or [])
    if words and words[0].startswith("-") and words[0] != "--":
        raise UsageError(
            f"{words[0]} stands after the host, where the command begins. Options come before the "
            f"host, for example: virtclust run --name {cluster.name} {host} -- hostname"
        )
    # The parser keeps this separator, since options after the host belong to the command.
    if words[:1] == ["--"]:
        del words[0]
    line = words[0] if len(words) == 1 else shlex.join(words)
    ssh = find_tool("ssh")
    arguments = [ssh, "-F", str(cluster.ssh_config), full_name, *([line] if line else [])]
    # ssh takes over the terminal and the exit status.
    os.execv(ssh, arguments)


def demo(
    loopback: Annotated[
        bool, option("hosts without network namespaces (no root needed)", "--loopback")
    ] = False,
    epochs: Annotated[int, whole_number_option("how long to train", "--epochs")] = 70,
    as_json: AsJson = False,
) -> None:
    """Train on virtual hosts of this machine while hosts join, leave and fail.

    A small network learns handwritten digits on two of three virtual hosts; the third joins, one
    leaves and comes back, and a worker is killed. It takes two minutes and needs nothing but
    PyTorch and Horovod; the data comes with the package.

    Examples:
      hvd-elastic demo

      hvd-elastic demo --loopback --json
    """
    for package, mend in (
        ("torch", f"pip install '{TORCH_REQUIREMENT}'"),
        ("horovod", "hvd-elastic build-horovod"),
    ):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"the demo trains with {package}, which is not installed; run: {mend}")
    from rich.console import Console

    from hvd_elastic.bench.demo import play

    console = Console(file=unfiltered(sys.stderr if as_json else sys.stdout))
    status = play(console, loopback, epochs, as_json)
    if status:
        raise typer.Exit(status)


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``virtclust``."""
    # SIGTERM and SIGHUP raise SystemExit, so that a terminated "up" cleans up too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    enter("virtclust", typer.main.get_command(app), argv)


if __name__ == "__main__":
    main()
