"""Copy a dataset from a shared store to many hosts, reading it from the store only once.

Each host fetches a share of the files by a command of the user. The hosts then exchange their
shares in a ring: each feeds the next one, and the last feeds the first (see ``session``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hvd_elastic.errors import SshError, UsageError
from hvd_elastic.programs.copy.fetch_command import literal_placeholders, placeholders
from hvd_elastic.programs.copy.frames import pack, unpack
from hvd_elastic.programs.copy.tree import ANY, check_inside, decode, is_excluded, shown
from hvd_elastic.tools.copy.chain import Chain, Verdict, Why
from hvd_elastic.tools.copy.job import Copied, CopyJob, Pulled
from hvd_elastic.tools.copy.pulling_shares import Shares
from hvd_elastic.tools.copy.session import SILENCE_S, CopySession, Node

log = logging.getLogger(__name__)


def read_list(data: bytes, patterns: Sequence[str] = ()) -> tuple[tuple[str, int | None], ...]:
    r"""Return the (path, size in bytes or None) of each file in a list.

    Args:
        data: the list: in each line a path, or a size, a tab and a path.
        patterns: patterns of paths to leave out (see ``node.tree.is_excluded``).

    Raises:
        UsageError: a line is not a path below a folder; names the line and the reason.

    >>> read_list(b"a/b.tar\n1024\tc.tar\n")
    (('a/b.tar', None), ('c.tar', 1024))
    """
    found: dict[str, int | None] = {}
    for number, line in enumerate(decode(data).split("\n"), 1):
        before, tab, after = line.removesuffix("\r").partition("\t")
        sized = bool(tab) and before.strip().isdecimal()
        path = (after if sized else before + tab + after).removeprefix("./")
        if not path or path.endswith("/"):
            continue  # an empty line, or a folder
        try:
            check_inside(path)
        except ValueError as error:
            raise UsageError(
                f"--list, line {number}: {error}; write paths as they shall be below DST, as in "
                "images/1.tar, or 1024<tab>images/1.tar with the size"
            ) from error
        if not is_excluded(path, list(patterns)):
            found[path] = int(before) if sized else None
    names = set(found)
    for path in found:
        for end in (place for place, letter in enumerate(path) if letter == "/"):
            if path[:end] in names:
                raise UsageError(
                    f"--list: {shown(path[:end])} cannot be a file, since {shown(path)} is below it"
                )
    if not found:
        raise UsageError("--list: there is no file in it; write a path a line")
    return tuple(found.items())


def check_pull(command: str, listed: bool) -> None:
    """Check that a command has the placeholders that it needs.

    Raises:
        UsageError: one is missing or not allowed; names it.
    """
    names = set(placeholders(command))
    if "dst" not in names:
        raise UsageError(
            "--pull: the command does not say where to: put {dst} there, as in "
            "'aws s3 sync s3://bucket/set {dst}'"
        )
    for name in literal_placeholders(command):
        raise UsageError(
            f"--pull: {{{name}}} stays as it is in a here-document whose word is quoted; leave the "
            f"quotes after << out, or read the environment variable hvd_{name} there"
        )
    if listed and len(names & {"path", "list"}) != 1:
        raise UsageError(
            "--pull: with --list the command needs {path} (it is run for each file) or {list} (it "
            "is run once with the name of a list of its files), and not both"
        )
    if not listed and names & {"path", "list"}:
        wanted = " and ".join(f"{{{name}}}" for name in sorted(names - {"dst"}))
        raise UsageError(f"--pull: for {wanted} say which files there are: --list FILE")


class PullSession(CopySession):
    """A copy in which the hosts themselves are the source: each fetches a share of the files."""

    program = "hvd_elastic.programs.copy.pulling_node"

    def __init__(self, job: CopyJob, pulled: Pulled) -> None:
        super().__init__(job)
        self._source = None
        self._chain = Chain(None)
        self._pulled = pulled
        self._listed = None if pulled.files is None else pack(pulled.files)
        self._shares = Shares(1 if pulled.files is None else len(pulled.files))
        # By host: number and size of the listed files that it had. By file: size, time and mode.
        self._there: dict[str, tuple[int, int]] = {}
        self._entries: dict[int, list[int]] = {}
        self._told: set[str] = set()
        self._fetched: dict[str, list[int]] = {}
        self._missing: list[str] = []
        self._first_listed = 0.0
        self._shared_out = False

    # ---- differences from a copy with a source

    def _config(self, node: Node) -> dict[str, Any]:
        pulled = self._pulled
        return {**super()._config(node), "command": pulled.command, "jobs": pulled.jobs}

    def _send_tree(self, node: Node) -> None:
        if node.name not in self._told:
            self._told.add(node.name)
            node.tell("list", files=self._listed or pack(None))
        elif node.name in self._there:
            super()._send_tree(node)

    def _handle_event(self, node: Node, event: dict[str, Any] | Exception) -> None:
        node.heard = self._now
        if isinstance(event, dict) and event["say"] == "listed":
            self._first_listed = self._first_listed or self._now
            self._take_listed(node, unpack(event["have"]))
        elif isinstance(event, dict) and event["say"] == "fetched":
            self._take_fetched(node, event)
        else:
            super()._handle_event(node, event)

    def _tick(self) -> None:
        if self._tree is not None:
            super()._tick()
            return
        for node in self._nodes.values():
            if node.state == "fetching" and self._now - node.heard > SILENCE_S:
                self._drop(node, "it fell silent while it fetched its share")
        self._share_out()

    def _excuse(self, seconds: float) -> None:
        super()._excuse(seconds)
        for node in self._nodes.values():
            node.heard += seconds

    def _lose(self, node: Node, error: Exception) -> None:
        others = self._others(node)
        super()._lose(node, error)
        self._replace(node, others)

    def _obey(self, verdict: Verdict) -> None:
        node = self._nodes[verdict.name]
        others = self._others(node)
        super()._obey(verdict)
        if verdict.why is Why.SILENT and node.state == "done":
            # The host is complete, but the files that it was to pass on to others are lost.
            self._replace(node, others)

    def _take_complete(self, node: Node, event: dict[str, Any]) -> None:
        if node.name not in self._chain:  # it needs nothing, but it has files that others need
            self._chain.add_node(node.name, self._now)
        super()._take_complete(node, event)

    def _copied(self, node: Node, problems: Sequence[str] = ()) -> Copied:
        fetched = self._fetched.get(node.name, [])
        plain = super()._copied(node, [*self._missing, *problems])
        failure = "" if self._missing else self._shares.failures.get(node.name, "")
        return replace(
            plain,
            skipped=plain.skipped - len(fetched),
            fetched=len(fetched),
            fetched_bytes=sum(fetched),
            failure=failure,
        )

    # ---- fetching

    def _take_listed(self, node: Node, have: list[list[int]]) -> None:
        self._there[node.name] = (len(have), sum(entry[1] for entry in have))
        for index, size, mtime_ns, mode in have if not self._shared_out else ():
            known = self._entries.get(index)
            # Hosts may have different versions; if the list has no sizes, the newest one is used.
            if known is None or mtime_ns > known[1]:
                self._entries[index] = [size, mtime_ns, mode]
                self._shares.owners[index] = node.name
        self._send_tree(node)

    def _others(self, node: Node) -> list[str]:
        """Return the hosts that can fetch in place of a host.

        Before the exchange these are all that can; later the one that it feeds comes first.
        """
        if self._tree is None:
            found = [
                name
                for name, other in self._nodes.items()
                if other.state in ("comparing", "fetching") and name in self._there
            ]
        elif node.name in self._chain:
            return self._chain.after(node.name)
        else:
            found = self._chain.order
        return [name for name in found if name != node.name]

    def _share_out(self) -> None:
        """Assign the files once every host has reported its own; a late host is only fed."""
        if self._shared_out:
            return
        states = {name: node.state for name, node in self._nodes.items()}
        comparing = [name for name, state in states.items() if state == "comparing"]
        able = [name for name in comparing if name in self._there]
        waits = self._now - self._first_listed < self._job.options.connect_timeout_s
        waits = waits or self._job.settings.dry_run  # a late host would not be in the plan
        if not able or able != comparing or ("connecting" in states.values() and waits):
            return
        self._shared_out = True
        orders = self._shares.assign_all(able if self._pulled.files is not None else able[:1])
        for name in able:
            if self._job.settings.dry_run:
                self._end_planned(self._nodes[name], orders.get(name, []))
            else:
                self._nodes[name].state = "fetching"
        if not self._job.settings.dry_run:
            self._order(orders)
            self._end_fetching()

    def _end_planned(self, node: Node, indices: list[int]) -> None:
        """Record, in a dry run, what a host would do."""
        there, there_bytes = self._there[node.name]
        sizes = [size or 0 for _, size in self._pulled.files or ()]
        fetched_bytes = sum(sizes[index] for index in indices) if sizes else 0
        plan = Copied(
            files=max(0, len(sizes) - there - len(indices)),
            size_bytes=max(0, sum(sizes) - there_bytes - fetched_bytes),
            skipped=there,
            touched=0,
            removed=(),
            fetched=len(indices),
            fetched_bytes=fetched_bytes,
        )
        self._end_well(node, plan)

    def _order(self, orders: dict[str, list[int]]) -> None:
        for name, indices in orders.items():
            log.debug("%s fetches %d files", name, len(indices))
            if self._tree is None:
                self._nodes[name].state = "fetching"
            self._nodes[name].tell("fetch", files=pack(indices))

    def _take_fetched(self, node: Node, event: dict[str, Any]) -> None:
        if node.state == "failed":
            return
        files = unpack(event["files"])
        self._fetched.setdefault(node.name, []).extend(unpack(event["sizes"]))
        self._entries.update({index: entry for index, *entry in files})
        failed = unpack(event["failed"])
        if failed:
            log.debug("%s could not fetch %d files: %s", node.name, len(failed), event["why"])
        why = f"{event['why']} (on {node.name})"
        able = [node.name, *self._others(node)]
        known = set(self._shares.lost)
        orders = self._shares.hear(node.name, unpack(event["came"]), failed, why, able)
        self._order(orders)
        if self._tree is not None:
            new = [index for index in self._shares.lost if index not in known]
            if new:
                node.tell("forget", files=new, why=why)
            return
        if event["tree"] is not None:
            self._tree = event["tree"]
        self._end_fetching()

    def _end_fetching(self) -> None:
        """Begin the exchange if nothing is being fetched any more."""
        if not self._shared_out or not self._shares.finished:
            return
        if self._pulled.files is not None:
            self._missing = [
                f"{shown(self._pulled.files[index][0])} was not fetched: {why}"
                for index, why in self._shares.lost.items()
            ]
            self._tree = pack(self._make_tree(self._pulled.files))
        if self._tree is None:
            why = f"nothing was fetched: {'; '.join(self._shares.failures.values())}"
            for node in self._nodes.values():
                super()._lose(node, SshError(f"host {node.host.name}: {why}"))
            return
        for node in self._nodes.values():
            if node.state == "fetching":
                node.state = "comparing"
            if node.name in self._there:
                self._send_tree(node)

    def _make_tree(self, files: Sequence[tuple[str, int | None]]) -> list[Any]:
        entries = []
        folders = {""}
        for index, (path, _) in enumerate(files):
            if index not in self._shares.owners:
                continue
            entries.append([path, *self._entries[index]])
            parts = path.split("/")
            folders |= {"/".join(parts[:end]) for end in range(1, len(parts))}
        # Parents before their contents; times and modes of folders in the store are unknown.
        return [True, entries, [[path, ANY, ANY] for path in sorted(folders)], [], [], [], []]

    # ---- hosts that are lost

    def _replace(self, node: Node, others: list[str]) -> None:
        """Let other hosts fetch the files that a lost host had."""
        if not self._shared_out:
            self._shares.disown(node.name)
            return
        if self._tree is not None and others:
            well = [name for name in others if name not in self._shares.failures]
            others = (well or others)[:1]
        orders = self._shares.lose(node.name, others)
        if self._tree is None:
            self._order(orders)
            self._end_fetching()
        elif self._pulled.files is not None:
            self._order(orders)
        else:
            for name in orders:
                why = f"{node.name}, which fetched it, was lost; call again"
                self._nodes[name].tell("forget", files=None, why=why)
