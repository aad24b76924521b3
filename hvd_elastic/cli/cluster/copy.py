"""Implement ``copyclust``: copy files to every host, from host to host."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hvd_elastic.cli.cluster.command_output import copy_bar
from hvd_elastic.cli.cluster.host_options import HostOptions
from hvd_elastic.cli.cluster.host_report import Printer, finish
from hvd_elastic.cli.options import (
    argument,
    command,
    given_options,
    number_option,
    option,
    whole_number_option,
)
from hvd_elastic.errors import HvdElasticError, UsageError
from hvd_elastic.formatting import bytes_words, count
from hvd_elastic.hosts.fanout import HostResult
from hvd_elastic.hosts.hostfile import Host, parse_hosts
from hvd_elastic.replaced_files import SavedFile

if TYPE_CHECKING:
    from hvd_elastic.tools.copy.job import Copied, CopySettings, Pulled


_NOT_WITH_PULL = ("checksum", "shard", "source_host", "hard_links", "sparse", "xattrs")
_NOT_WITH_FROM_EACH = (
    *(*_NOT_WITH_PULL, "delete", "exclude", "include", "bwlimit", "plain", "pull", "listed"),
)


@command(HostOptions)
def copy(
    chosen: HostOptions,
    context: typer.Context,
    places: Annotated[
        list[str],
        argument(
            "SRC: a file or folder here, or on --from HOST; SRC/: what is in the folder; none "
            "with --pull. DST: its place on every host, absolute or ~/…; DST/: inside it.",
            "[SRC] DST",
        ),
    ],
    delete: Annotated[
        bool, option("remove files at DST that SRC does not have", "--delete")
    ] = False,
    exclude: Annotated[
        list[str] | None,
        option(
            "skip files (*.tmp, cache, data/old*), and never delete them at DST; may be repeated",
            "--exclude",
            metavar="PATTERN",
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        option(
            "copy files that --exclude would skip (without it, only these); may be repeated",
            "--include",
            metavar="PATTERN",
        ),
    ] = None,
    hard_links: Annotated[bool, option("keep hard links", "--hard-links", "-H")] = False,
    sparse: Annotated[bool, option("write runs of zeros as holes", "--sparse", "-S")] = False,
    xattrs: Annotated[bool, option("keep extended attributes", "--xattrs", "-X")] = False,
    checksum: Annotated[bool, option("compare contents, not size and time", "--checksum")] = False,
    bwlimit: Annotated[
        float,
        number_option("limit on what each host sends; 0: no limit", "--bwlimit", metavar="MB/S"),
    ] = 0.0,
    compress: Annotated[
        bool, option("compress if that is faster", "--compress/--no-compress")
    ] = True,
    plain: Annotated[
        bool, option("do not encrypt: for a network that you trust", "--plain")
    ] = False,
    shard: Annotated[
        bool, option("give each host only its part: every n-th file", "--shard")
    ] = False,
    source_host: Annotated[
        str | None, option("host that has SRC", "--from", metavar="HOST")
    ] = None,
    from_each: Annotated[
        bool, option("fetch the file SRC of each host into DST/HOST/ here", "--from-each")
    ] = False,
    pull: Annotated[
        str | None,
        option(
            "command that fetches files from shared storage into {dst}, in place of SRC",
            "--pull",
            metavar="COMMAND",
        ),
    ] = None,
    listed: Annotated[
        str | None,
        option(
            "list of the files for --pull (-: stdin), a path a line, or size, tab, path; each "
            "host fetches a share of them: {path} for each, or {list}",
            "--list",
            metavar="FILE",
        ),
    ] = None,
    jobs: Annotated[
        int,
        whole_number_option(
            "number of commands of --pull with {path} at a time", "--jobs", least=1
        ),
    ] = 8,
) -> None:
    """Copy a file or folder to every host; it is sent once and passed on from host to host.

    Only files that differ (by size and time) are sent, and each is verified by SHA-256 before it
    gets its name. Repeat the command after an interruption to continue.

    For example:

      copyclust hosts train.py '~/job/'

      copyclust hosts /data/digits /data/digits --delete --exclude '*.tmp'

      copyclust hosts digits/ /data/digits/ --from gpu07 --bwlimit 50

      copyclust hosts -H -S -X images/ /var/lib/images/

      copyclust hosts '~/job/train.log' logs --from-each

      copyclust hosts --pull 'aws s3 sync s3://bucket/set {dst}' /data/set

      copyclust hosts --pull 'aws s3 cp s3://bucket/set/{path} {dst}/{path}' --list names /data/set
    """
    from hvd_elastic.programs.copy.tree import Keeps
    from hvd_elastic.tools.copy.copying import CopySettings, copy_to_hosts

    if not places[0]:
        # Path would turn it into the current folder.
        name = "source" if pull is None else "destination"
        raise UsageError(f"{name} '': it is empty. Is a variable of your script not set?")
    for pattern in exclude or ():
        if any(host.name == pattern for host in chosen.hosts):
            raise UsageError(
                f"--exclude {pattern}: {pattern} is a host, and --exclude leaves out files. Leave "
                f"the host out by --exclude-hosts {pattern}, a file of this name by "
                f"--exclude /{pattern}"
            )
    settings = CopySettings(
        delete=delete,
        exclude=_patterns(exclude or (), include or ()),
        checksum=checksum,
        plain=plain,
        compress=compress,
        bytes_per_s=bwlimit * 1e6,
        keeps=Keeps(hard_links, sparse, xattrs),
        shard=shard,
        dry_run=chosen.dry_run,
        fanout=chosen.fanout,
    )
    if hard_links and shard:
        raise UsageError("--hard-links does not go with --shard: a host may lack the first name")
    given = given_options(context)
    for flag, others in (("from_each", _NOT_WITH_FROM_EACH), ("pull", _NOT_WITH_PULL)):
        if flag in given and (wrong := [word for name, word in given.items() if name in others]):
            raise UsageError(f"{wrong[0]} does not go with {given[flag]}; leave it out")
    if from_each:
        _fetch(chosen, places)
        return
    start, pulled = None, None
    if pull is not None:
        pulled, target = _read_pull(pull, places, listed, jobs, settings)
        source: str | Pulled = pulled
    else:
        start = _find_host(chosen.hosts, source_host) if source_host else None
        source, target = _read_places(places, listed, start)
    printer = Printer(chosen.hosts)
    newcomers = Newcomers(chosen, printer.print_note)
    chosen = chosen.over(newcomers.hosts)
    with copy_bar(quiet=chosen.as_json) as show:
        finish(
            chosen,
            copy_to_hosts(
                chosen.hosts,
                source,
                target,
                chosen.ssh,
                settings,
                start,
                show,
                lambda path: printer.print_note(f"{path}: neither file, folder nor link; left out"),
                newcomers,
            ),
            printer,
            lambda result: describe_copied(result, target, pulled is not None),
            lambda result: copied_in_words(result, chosen, printer, pulled),
        )


def _patterns(exclude: Sequence[str], include: Sequence[str]) -> tuple[str, ...]:
    from hvd_elastic.programs.copy.tree import TAKES

    skipped = exclude or (["*"] if include else [])
    return (*skipped, *(TAKES + pattern for pattern in include))


def _fetch(chosen: HostOptions, places: Sequence[str]) -> None:
    """Fetch a file of each host."""
    from hvd_elastic.tools.copy.fetching import fetch_from_each

    if len(places) != 2:
        raise UsageError("with --from-each give SRC, a file of each host, and DST, a folder here")
    source, folder = places[0], Path(places[1]).expanduser()
    printer = Printer(chosen.hosts)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"destination {folder} is a file; with --from-each it is a folder here")
    if chosen.dry_run:
        for host in chosen.hosts:
            printer.lines(host, "stdout", f"would fetch {source} to {folder / host.name}/")
        return
    finish(
        chosen,
        fetch_from_each(chosen.hosts, source, folder, chosen.ssh, chosen.fanout),
        printer,
        lambda result: {
            "path": str(result.value.path) if result.value else None,
            "bytes": result.value.size_bytes if result.value else 0,
        },
        lambda result: f"{result.answer.path}, {bytes_words(result.answer.size_bytes)}",
        tell_reasons=True,
    )


def _read_places(
    places: Sequence[str], listed: str | None, source_host: Host | None
) -> tuple[str, str]:
    """Return the source and the destination."""
    from hvd_elastic.tools.copy.copying import check_destination, check_source

    if listed is not None:
        raise UsageError("--list says what --pull fetches; give --pull COMMAND")
    if len(places) != 2:
        raise UsageError("give SRC and DST, or --pull COMMAND and DST; see copyclust --help")
    source = places[0] if source_host else os.path.expanduser(places[0])  # noqa: PTH111
    target = check_destination(source, places[1])
    if source_host is None:
        check_source(source)
    return source, target


def _read_pull(
    command: str,
    places: Sequence[str],
    listed: str | None,
    jobs: int,
    settings: CopySettings,
) -> tuple[Pulled, str]:
    """Return what to fetch, and the destination."""
    from hvd_elastic.tools.copy.copying import Pulled, check_destination
    from hvd_elastic.tools.copy.pulling_session import check_pull, read_list

    if len(places) != 1:
        raise UsageError("with --pull give DST alone; the command says where the files come from")
    check_pull(command, listed is not None)
    files = None
    if listed is not None:
        try:
            list_path = Path(listed).expanduser()
            data = sys.stdin.buffer.read() if listed == "-" else list_path.read_bytes()
        except OSError as error:
            raise UsageError(f"--list {listed}: {error.strerror}") from error
        files = read_list(data, settings.exclude)
    target = check_destination(Path(places[0]), places[0].rstrip("/") or "/")
    return Pulled(command, files, jobs), target


def _find_host(hosts: Sequence[Host], text: str) -> Host:
    """Return the host of that name from the hostfile, or else a host parsed from the text."""
    known = next((host for host in hosts if host.name == text), None)
    return known or parse_hosts(text, "--from").hosts[0]


class Newcomers:
    """A call returns the hosts that were added to the hostfile since the last call.

    Args:
        chosen: the shared options, with the hosts at the start.
        note: function that prints messages about new hosts and mistakes in the hostfile.

    Attributes:
        hosts: all hosts so far; this list grows in place.
    """

    def __init__(self, chosen: HostOptions, note: Callable[[str], None]) -> None:
        self.hosts = list(chosen.hosts)
        self._chosen = chosen
        self._note = note
        self._file = SavedFile(chosen.hostfile)

    def __call__(self) -> list[Host]:
        if not self._file.saved(time.monotonic()) or not self._file.mark_read() or self._file.error:
            return []
        try:
            now = self._chosen.read_hosts()
        except HvdElasticError as error:
            self._note(f"{error}; until that is right no host joins")
            return []
        known = {host.name for host in self.hosts}
        new = [host for host in now if host.name not in known]
        self.hosts += new
        for host in new:
            self._note(f"host {host.name} joins: it is in {self._chosen.hostfile} now")
        return new


def describe_copied(result: HostResult[Copied], target: str, pulls: bool) -> dict[str, Any]:
    """Return the fields of a host's JSON object besides its outcome."""
    from hvd_elastic.tools.copy.job import Copied

    value = result.value or Copied(0, 0, 0, 0, ())
    fetched = {
        "fetched": value.fetched,
        "fetched_bytes": value.fetched_bytes,
        "fetch_error": value.failure,
    }
    return {
        "destination": target,
        "files": value.files,
        "bytes": value.size_bytes,
        "resumed_bytes": value.resumed_bytes,
        "skipped": value.skipped,
        "touched": value.touched,
        "removed": list(value.removed),
        "unreached": list(value.unreached),
        **(fetched if pulls else {}),
        "problems": list(value.problems),
    }


def copied_in_words(
    result: HostResult[Copied], chosen: HostOptions, printer: Printer, pulled: Pulled | None
) -> str:
    """Return the line of text for a host; print further notes about it."""
    value, name = result.answer, result.host.name
    if chosen.dry_run and pulled is not None and pulled.files is None:
        return "would run the command" if value.fetched else "would take it from the others"
    parts = []
    if pulled is not None:
        fetched = f", {bytes_words(value.fetched_bytes)}" if value.fetched_bytes else ""
        done = "to fetch" if chosen.dry_run else "fetched"
        parts.append(f"{count(value.fetched, 'file')}{fetched} {done}")
    if value.files:
        rate = bytes_words(value.size_bytes / max(result.seconds, 1e-3))
        done = "to copy" if chosen.dry_run else f"copied ({rate}/s)"
        parts.append(f"{count(value.files, 'file')}, {bytes_words(value.size_bytes)} {done}")
    if value.failure:
        printer.print_note(
            f"host {name}: the command failed there, others fetched its share: {value.failure}"
        )
    if value.skipped or not (parts or value.touched):
        parts.append(f"{count(value.skipped, 'file')} up to date")
    if value.touched:
        done = "to get" if chosen.dry_run else "got"
        parts.append(f"{count(value.touched, 'file')} {done} another time or mode only")
    if value.unreached:
        printer.print_note(
            f"host {name}: {', '.join(value.unreached)} could not connect to it, so others fed it. "
            "Hosts should reach one another: checkclust shows who does not"
        )
    if value.removed:
        parts.append(f"{len(value.removed)} {'to remove' if chosen.dry_run else 'removed'}")
        for path in value.removed if chosen.dry_run or chosen.verbose else ():
            printer.lines(result.host, "stdout", f"remove {path}")
    return ", ".join(parts)
