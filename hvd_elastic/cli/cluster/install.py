"""Implement ``install`` and ``uninstall`` (this environment on hosts) and ``build-horovod``."""

from __future__ import annotations

import contextlib
import errno
import getpass
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hvd_elastic.cli.cluster.command_output import copy_bar
from hvd_elastic.cli.cluster.host_options import HereOptions, HostOptions
from hvd_elastic.cli.cluster.host_report import Printer, finish
from hvd_elastic.cli.options import command, option, whole_number_option
from hvd_elastic.cli.output import print_json_line
from hvd_elastic.errors import BuildError, UsageError
from hvd_elastic.formatting import bytes_words, count
from hvd_elastic.hosts.fanout import HostResult
from hvd_elastic.hosts.hostfile import Host, fold_hosts
from hvd_elastic.hosts.ssh import own_known_hosts
from hvd_elastic.tools.bootstrap import bring_key, find_leader_key
from hvd_elastic.tools.trust import ShownKey, TrustState, trust_hosts

if TYPE_CHECKING:
    from hvd_elastic.tools.installing import Installed


Bootstrap = Annotated[
    bool, option("first accept host keys and install your own key there", "--bootstrap")
]
Yes = Annotated[bool, option("accept without asking, with --bootstrap", "--yes", "-y")]
# Errors that another place for files helps against: full, read-only or closed, a file in the place
# of a folder, and a file system without locks.
UNWRITABLE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOLCK,
    errno.ENOTSUP,
)
REFUSED = (TrustState.DECLINED, TrustState.REFUSED, TrustState.UNREACHABLE)


def accept_host_keys(
    chosen: HostOptions,
    yes: bool,
    also: str = "",
    then: Callable[[list[ShownKey]], None] = lambda _: None,
) -> list[ShownKey]:
    """Show the unknown keys of the hosts, ask once, and accept them.

    Args:
        yes: whether to accept without asking.
        also: a further action that the answer is about, such as "let …"; with it, the question is
            asked even if all keys are known.
        then: does that with the hosts, those of jump hosts before the ones behind them.

    Returns:
        One entry for each host.

    Raises:
        typer.Exit: the answer to ``also`` alone was no.
    """
    asked = yes

    def confirm(unknown: list[ShownKey]) -> bool:
        nonlocal asked
        first, asked = not asked, True
        if not chosen.as_json:
            width = max(len(entry.host) for entry in unknown)
            for entry in unknown:
                kind = entry.key.key_type if entry.key else ""
                print(f"{entry.host:{width}}  {kind}  {entry.fingerprint}", flush=True)
        what = f"Accept {count(len(unknown), 'key')}" + (f", and {also}" if also and first else "")
        return yes or _ask(chosen, what)

    def trusted(shown: list[ShownKey]) -> None:
        nonlocal asked
        if shown and also and not asked and not _ask(chosen, also[:1].upper() + also[1:]):
            raise typer.Exit(1)
        asked = asked or bool(shown)
        then(shown)

    shown = trust_hosts(chosen.hosts, chosen.ssh, confirm, chosen.fanout, trusted)
    counts = Counter(entry.state for entry in shown)
    for entry in shown:
        if chosen.as_json:
            print_json_line(
                {
                    "kind": "key" if also else "host",
                    "host": entry.host,
                    "state": entry.state.value,
                    "key_type": entry.key.key_type if entry.key else None,
                    "fingerprint": entry.fingerprint or None,
                    "error": entry.message,
                }
            )
        elif entry.message:
            print(f"{entry.host}: {entry.state.value}: {entry.message}", file=sys.stderr)
    if not chosen.as_json:
        words = [f"{number} {state.value}" for state, number in counts.items()]
        print(
            f"{count(len(shown), 'host')}: {', '.join(words)} ({own_known_hosts()})",
            file=sys.stderr,
        )
    return shown


def bootstrap_hosts(chosen: HostOptions, yes: bool) -> None:
    """Accept host keys and install the leader's key on the hosts that lack it.

    Raises:
        typer.Exit: the user declined.
    """
    key = find_leader_key(chosen.hosts, chosen.ssh)
    what = key.fingerprint or "a new one"
    number = count(len(chosen.hosts), "host")

    def ask_password(refusing: Sequence[Host]) -> str | None:
        if chosen.as_json or not sys.stdin.isatty():
            return None
        names = fold_hosts([host.name for host in refusing])
        return getpass.getpass(f"Password for {names} (used once, not kept): ") or None

    results: list[HostResult[str]] = []

    def bring(shown: list[ShownKey]) -> None:
        nonlocal key
        fit = {entry.host for entry in shown if entry.state not in REFUSED}
        hosts = [host for host in chosen.hosts if host.name in fit]
        if hosts and all(entry.state is not TrustState.DECLINED for entry in shown):
            key = key.make()
            results.extend(bring_key(hosts, key, chosen.ssh, ask_password, chosen.fanout))

    also = f"let your key {key.path} ({what}) log in on the {number} of the hostfile"
    shown = accept_host_keys(chosen, yes, also, bring)
    if any(entry.state is TrustState.DECLINED for entry in shown):
        raise typer.Exit(1)
    if chosen.as_json:
        return
    done = Counter(result.value for result in results if result.ok)
    for result in results:
        if not result.ok:
            print(result.error, file=sys.stderr)
    words = [f"{number} {word}" for word, number in done.items()]
    print(f"key {key.path}: {', '.join(words) or 'on no host'}", file=sys.stderr)


def _ask(chosen: HostOptions, what: str) -> bool:
    if chosen.as_json or not sys.stdin.isatty():
        if not chosen.as_json:
            print(f"{what}? Not asked: this is no terminal; --yes accepts", file=sys.stderr)
        return False
    print(f"{what}? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


PARTS = ("environment", "cache", "runs")


@command(HostOptions)
def install(chosen: HostOptions, bootstrap: Bootstrap = False, yes: Yes = False) -> None:
    """Bring this environment, with Horovod, to the same path on every host, or upgrade it there.

    It is sent as by copyclust, only where it differs, checked on every host (versions, imports),
    and takes the place of an older one when all of it is there. Repeat the command after an
    interruption to continue. An environment that a run uses is not changed.

    For example:

      hvd-elastic install hosts

      hvd-elastic install hosts --bootstrap

      hvd-elastic install hosts --hosts node[3-4] --dry-run
    """
    from hvd_elastic.tools.installing import Installation, Installed, own_environment

    environment = own_environment()
    if bootstrap:
        bootstrap_hosts(chosen, yes)
    printer = Printer(chosen.hosts)

    def in_words(result: HostResult[Installed]) -> str:
        value = result.answer
        if value.note:
            printer.print_note(f"host {result.host.name}: {value.note}")
        if value.environment != "installed":
            same = " (the same folder as here)" if value.environment == "shared" else ""
            return f"{environment.prefix} is up to date{same}"
        removed = f", {value.removed} {'to remove' if chosen.dry_run else 'removed'}"
        sizes = f"{count(value.files, 'file')}, {bytes_words(value.size_bytes)}"
        how = "would install" if chosen.dry_run else "installed"
        return f"{how} {environment.prefix} ({sizes}{removed if value.removed else ''})"

    def describe(result: HostResult[Installed]) -> dict[str, Any]:
        return {"destination": str(environment.prefix), **asdict(result.value or Installed(""))}

    with copy_bar(quiet=chosen.as_json) as show:
        installation = Installation(
            chosen.hosts,
            environment,
            chosen.ssh,
            dry_run=chosen.dry_run,
            fanout=chosen.fanout,
            wheel=_kept_wheel(),
            on_step=printer.passing,
            on_progress=show,
        )
        finish(chosen, installation.run(), printer, describe, in_words)


def _kept_wheel() -> Path | None:
    from hvd_elastic.install.build_horovod import patch_digest
    from hvd_elastic.install.horovod_wheel import cached_wheel, check_kept, detect_inputs

    with contextlib.suppress(BuildError, OSError):
        wheel = cached_wheel(detect_inputs(patch_digest()))
        if wheel is not None:
            check_kept(wheel)
            return wheel.parent
    return None


@command(HereOptions, but=["dry_run"])
def uninstall(
    chosen: HostOptions,
    only: Annotated[
        list[str] | None,
        option(
            "environment, cache or runs (with checkpoints); may be repeated (default: environment)",
            "--only",
            metavar="PART",
        ),
    ] = None,
    yes: Annotated[bool, option("remove it; otherwise list it", "--yes", "-y")] = False,
) -> None:
    """List what hvd_elastic has on every host (without a hostfile: here), with --yes remove it.

    These are the environment that `install` has brought to this path, the cache folder with
    Horovod's wheels, which all environments of the user share, and the folder of runs. The last
    two are removed only by --only cache and --only runs. What is in use stays.

    For example:

      hvd-elastic uninstall hosts

      hvd-elastic uninstall hosts --only environment --only cache --yes
    """
    from hvd_elastic.tools.installing import own_environment
    from hvd_elastic.tools.installing import uninstall as remove_from_hosts

    for name in only or ():
        if name not in PARTS:
            raise UsageError(f"--only {name}: there is no such part; give {', '.join(PARTS)}")
    names = only or PARTS[:1]
    prefix = ""
    with contextlib.suppress(UsageError):  # the system's Python is nothing to remove
        prefix = own_environment().prefix
    printer = Printer(chosen.hosts)

    def in_words(each: dict[str, Any]) -> str:
        state = "removed" if each["removed"] else "to remove"
        if each["stays"]:
            state = f"stays: {each['stays']}"
        elif each["name"] not in names:
            state = f"stays, unless you give --only {each['name']}"
            if each["name"] == "cache":
                state += "; all environments of this user share it"
        if each["others"]:
            state += f"; not ours, and stays: {each['others']}"
        return f"{each['name']}  {each['path']}  {bytes_words(each['bytes'])}  {state}"

    def shown() -> Iterator[HostResult[list[dict[str, Any]]]]:
        asked = names if yes else ()
        for result in remove_from_hosts(chosen.hosts, prefix, asked, chosen.ssh, chosen.fanout):
            if result.value is not None and not chosen.as_json:
                text = "\n".join(map(in_words, result.value)) or "nothing"
                printer.lines(result.host, "stdout", text)
            yield result

    finish(chosen, shown(), printer, lambda result: {"found": result.value or []})
    if not yes and not chosen.as_json:
        print('Nothing was removed; --yes removes what is listed as "to remove"', file=sys.stderr)


def build_horovod(
    rebuild: Annotated[bool, option("build even if a wheel exists", "--rebuild")] = False,
    without_mpi: Annotated[bool, option("leave Open MPI out", "--without-mpi")] = False,
    without_tensorflow: Annotated[
        bool, option("leave TensorFlow out", "--without-tensorflow")
    ] = False,
    nccl: Annotated[
        bool | None,
        option(
            "include CUDA and NCCL, or leave them out (default: by whether there is a GPU)",
            "--with-nccl/--without-nccl",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        whole_number_option("compilers at once (default: by cores and memory)", "--jobs"),
    ] = None,
    print_name: Annotated[
        bool, option("print the name of the build and end", "--print-name")
    ] = False,
) -> None:
    """Build Horovod for this Python environment, keep the wheel, install it.

    Horovod is patched and compiled against the installed PyTorch, TensorFlow, or both. That takes
    some minutes once; the wheel is kept in your cache folder, and another environment with the same
    versions installs it in seconds.

    Examples:
      hvd-elastic build-horovod

      hvd-elastic build-horovod --without-mpi --jobs 4

      hvd-elastic build-horovod --rebuild
    """
    from hvd_elastic.install.build_horovod import patch_digest, provide_horovod
    from hvd_elastic.install.horovod_wheel import (
        detect_inputs,
        installed_build,
        torch_cuda,
        why_left_out,
    )

    inputs = detect_inputs(
        patch_digest(),
        with_tensorflow=not without_tensorflow,
        with_mpi=not without_mpi,
        with_nccl=nccl,
    )
    if print_name:
        print(inputs.name)
        return
    if (
        nccl is None
        and inputs.cuda is None
        and (cuda := torch_cuda())
        and installed_build() != inputs.name  # of this one nvidia-smi may not have said it
    ):
        print(
            f"No GPU here, so Horovod is built for CPUs; for CUDA {cuda} with NCCL: `make horovod` "
            "on a host with a GPU, or build-horovod --with-nccl",
            flush=True,
        )
    if not without_tensorflow and (why := why_left_out(inputs.cuda)):
        print(why, flush=True)
    try:
        provide_horovod(inputs, rebuild=rebuild, jobs=jobs)
    except BrokenPipeError:  # of our own output
        raise
    except OSError as error:
        # tempfile names no file if it finds no folder that it can write to.
        has_no_folder = isinstance(error, FileNotFoundError) and error.filename is None
        if error.errno not in UNWRITABLE and not has_no_folder:
            raise BuildError(str(error)) from error
        place = error.filename2 or error.filename or "a file"
        raise BuildError(
            f"{place} cannot be written: {error.strerror}; the wheel's folder is under "
            "XDG_CACHE_HOME, the build's under TMPDIR: free space there, or name others"
        ) from error
