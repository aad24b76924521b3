"""Format the result of ``copyclust`` for each host, as a line of text and as JSON."""

from __future__ import annotations

from typing import Any

from hvd_elastic.cli.cluster.host_options import HostOptions
from hvd_elastic.cli.cluster.host_report import Printer
from hvd_elastic.cluster.copy.job import Copied, Pulled
from hvd_elastic.formatting import bytes_words, count
from hvd_elastic.hosts.fanout import HostResult


def describe_copied(result: HostResult[Copied], target: str, pulls: bool) -> dict[str, Any]:
    """Return the fields of a host's JSON object besides its outcome."""
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
        printer.note(
            f"host {name}: the command failed there, others fetched its share: {value.failure}"
        )
    if value.skipped or not (parts or value.touched):
        parts.append(f"{count(value.skipped, 'file')} up to date")
    if value.touched:
        done = "to get" if chosen.dry_run else "got"
        parts.append(f"{count(value.touched, 'file')} {done} another time or mode only")
    if value.unreached:
        printer.note(
            f"host {name}: {', '.join(value.unreached)} could not connect to it, so others fed it. "
            "Hosts should reach one another: checkclust shows who does not"
        )
    if value.removed:
        parts.append(f"{len(value.removed)} {'to remove' if chosen.dry_run else 'removed'}")
        for path in value.removed if chosen.dry_run or chosen.verbose else ():
            printer.lines(result.host, "stdout", f"remove {path}")
    return ", ".join(parts)
