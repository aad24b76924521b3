"""Implement ``hvd-elastic install`` and ``uninstall``: this environment on other hosts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hvd_elastic.cli.cluster.bootstrapping import Bootstrap, Yes, bootstrap_hosts
from hvd_elastic.cli.cluster.command_output import copy_bar
from hvd_elastic.cli.cluster.host_options import HereOptions, HostOptions
from hvd_elastic.cli.cluster.host_report import Printer, finish
from hvd_elastic.cli.options import command, option
from hvd_elastic.errors import BuildError, UsageError
from hvd_elastic.formatting import bytes_words, count
from hvd_elastic.hosts.fanout import HostResult

if TYPE_CHECKING:
    from hvd_elastic.tools.installing import Installed

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
            printer.note(f"host {result.host.name}: {value.note}")
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
            "environment, cache or runs (with checkpoints); may be repeated (default: the "
            "first two).",
            "--only",
            metavar="PART",
        ),
    ] = None,
    yes: Annotated[bool, option("Remove it; otherwise list it.", "--yes", "-y")] = False,
) -> None:
    """List what hvd_elastic has on every host (without a hostfile: here), with --yes remove it.

    These are the environment that `install` has brought to this path, the cache folder with
    Horovod's wheels, and the folder of runs, which is removed only by --only runs. What is in use
    stays.

    For example:

      hvd-elastic uninstall hosts

      hvd-elastic uninstall hosts --only environment --yes
    """
    from hvd_elastic.tools.installing import own_environment
    from hvd_elastic.tools.installing import uninstall as remove_from_hosts

    for name in only or ():
        if name not in PARTS:
            raise UsageError(f"--only {name}: there is no such part; give {', '.join(PARTS)}")
    names = only or PARTS[:2]
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
