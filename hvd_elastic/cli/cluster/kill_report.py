"""Print the results of ``killclust``: processes, files, and holders of GPU memory."""

from __future__ import annotations

from typing import Any

from hvd_elastic.cli.cluster.host_report import Printer
from hvd_elastic.cluster.kill import Ended
from hvd_elastic.formatting import bytes_words, count
from hvd_elastic.hosts.fanout import HostResult


def describe_ended(result: HostResult[Ended]) -> dict[str, Any]:
    """Return the fields of this tool in the JSON object of a host."""
    value = result.value
    return {
        "processes": [vars(process) for process in value.processes] if value else [],
        "files": [vars(file) for file in value.files] if value else [],
        "gpus": list(value.gpus) if value else [],
    }


def show_ended(result: HostResult[Ended], printer: Printer, dry_run: bool) -> str:
    """Print a line for each process, file and holder of GPU memory; return the summary."""
    ended = result.answer
    for process in ended.processes:
        done = {"": "found", "left": "NOT ended"}.get(process.ended, f"{process.ended} ended")
        printer.lines(result.host, "stdout", f"{done} {process.pid}  {process.command}")
    for file in ended.files:
        done = "found" if dry_run else "removed"
        text = f"{done} {file.kind} {file.path}  {bytes_words(file.bytes)}"
        printer.lines(result.host, "stdout", text)
    for line in ended.gpus:
        printer.lines(result.host, "stdout", f"memory still held: {line}")
    text = f"{count(len(ended.processes), 'process')} {'found' if dry_run else 'ended'}"
    if ended.files:
        size = bytes_words(sum(file.bytes for file in ended.files))
        text += f", {len(ended.files)} left behind {'found' if dry_run else 'removed'} ({size})"
    return text
