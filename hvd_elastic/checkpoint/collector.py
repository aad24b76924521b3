"""Collects the shards of checkpoints from the hosts.

The leader passes on the reports of workers and agents. Files are transferred in threads, from all
hosts at once, one checkpoint at a time. If checkpoints come faster than the network can transfer
them, the newest complete one is next.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hvd_elastic.checkpoint.manifests import CheckpointInfo, warning_of_not_finite
from hvd_elastic.checkpoint.place import CheckpointStore
from hvd_elastic.checkpoint.shards import Key, ShardInfo, complete_sets, parse_shard, receive_shard
from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.errors import CheckpointError, HvdElasticError
from hvd_elastic.run_events import Checkpoint
from hvd_elastic.wire.framing import encode
from hvd_elastic.wire.messages import AgentHello, CheckpointWritten, Collected, LeaderToAgent

_AT_ONCE = 16
"""Most transfers at the same time; more would only compete for the leader's network."""


class HostFiles(Protocol):
    """The part of a connection to an agent that a collector uses."""

    @property
    def info(self) -> AgentHello | None:
        """Return the agent's hello, which describes its host; None before it arrived."""

    def send(self, message: LeaderToAgent) -> None:
        """Queue a message for the agent."""

    def receive(self, remote: str, write: Callable[[bytes | memoryview], object]) -> None:
        """Pass the content of a file of the host to ``write``; raises SshError on failure."""

    def put(self, local: Path, remote: str) -> None:
        """Copy a file to the host; raises SshError on failure."""

    def discard(self, remote: str) -> None:
        """Remove a folder of the host; raises SshError on failure."""


@dataclass(frozen=True)
class _Source:
    """A shard, and a host whose spool has it."""

    host: str
    agent: HostFiles
    shard: ShardInfo
    seconds: float = 0.0
    blocked_s: float = 0.0

    @property
    def remote(self) -> str:
        assert self.agent.info is not None
        return f"{self.agent.info.spool}/{self.shard.file}"


@dataclass(frozen=True)
class _Missed:
    """The newest checkpoint that could not be collected and is still in the hosts' spools."""

    key: Key
    sources: list[_Source]
    why: str


class CheckpointCollector:
    """Collects the checkpoints of one run; its methods are called from the leader's loop.

    Args:
        store: store that keeps the checkpoints.
        copies: number of other hosts that keep a copy of each shard.
        resumed: whether to collect checkpoints that an earlier leader has not collected.
        agents: returns the connections of the hosts that are up now, by host.
        post: schedules a call in the leader's loop.
        emit, warn: record an event or a warning.
        on_idle: called when no more checkpoint is being collected.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        copies: int,
        resumed: bool,
        agents: Callable[[], Mapping[str, HostFiles]],
        post: Callable[[Callable[[], None]], None],
        emit: Callable[[Checkpoint], None],
        warn: Callable[[str], None],
        on_idle: Callable[[], None],
    ) -> None:
        self._store = store
        self._copies = copies
        self._accepting = resumed
        self._agents = agents
        self._post = post
        self._emit = emit
        self._warn = warn
        self._on_idle = on_idle
        self._known: dict[Key, list[_Source]] = {}
        self._working = False
        self._idle = threading.Event()
        self._idle.set()
        self._complaints: set[str] = set()
        self._missed: _Missed | None = None
        self._writable = True
        self.newest_step = -1
        """Step of the newest checkpoint of the current history of training; -1: none."""
        self.resume_step = -1
        """Step of the newest one with finite weights, else of the newest one; -1: none."""
        self.newest_s = 0.0
        """How long that checkpoint took to be written and collected [s]."""
        self.expected = ""
        """Why there should be a checkpoint; empty: there need not be one."""

    @property
    def busy(self) -> bool:
        """Return whether a checkpoint is being collected."""
        return self._working

    def check(self) -> None:
        """Check that checkpoints can be written, before training starts.

        Raises:
            CheckpointError: they cannot be written, or there are checkpoints of another run.
        """
        self._writable = False
        try:
            self._store.check()
        finally:
            self.newest_step = self.resume_step = self._store.resume_step()
        self._writable = True

    # -- reports of shards -----------------------------------------------------------------

    def written(self, host: str, agent: HostFiles, said: CheckpointWritten) -> None:
        """Handle a worker's report that its shard is in the spool of its host."""
        try:
            shard = parse_shard(said.shard, self._store.folder)
        except ValueError as error:
            self._complain(f"host {host}: a checkpoint was not kept: {error}")
            return
        self._accepting = False
        source = _Source(host, agent, shard, said.seconds, said.blocked_s)
        self._known.setdefault(shard.key, []).append(source)
        self._begin()

    def offered(self, host: str, agent: HostFiles, spooled: Sequence[Any]) -> None:
        """Handle a new agent's list of shards in its host's spool, left under an earlier leader."""
        if not spooled:
            return
        if not self._accepting:
            # Training has continued from another state, so these shards are obsolete.
            agent.send(Collected(None))
            return
        for described in spooled:
            with contextlib.suppress(ValueError):
                shard = parse_shard(described, self._store.folder)
                self._known.setdefault(shard.key, []).append(_Source(host, agent, shard))
        self._begin()

    def failed(self, host: str, message: str) -> None:
        """Handle a worker's report that it could not write its shard."""
        self._complain(f"host {host}: {message}")

    def _complain(self, message: str) -> None:
        """Warn, but only once until a checkpoint succeeds, as a full disk affects all of them."""
        kind = re.sub(r"\d+", "#", message)
        if kind not in self._complaints:
            self._complaints.add(kind)
            self._warn(message)

    # -- collecting ------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._working:
            return
        shards = [source.shard for sources in self._known.values() for source in sources]
        whole = [parts for parts in complete_sets(shards) if parts[0].step >= self.newest_step]
        if whole:
            sources = self._known[whole[0][0].key]
            self._working = True
            self._idle.clear()
            threading.Thread(
                target=self._collect, args=(whole[0], sources), name="checkpoint", daemon=True
            ).start()

    def _collect(self, shards: Sequence[ShardInfo], sources: Sequence[_Source]) -> None:
        """Fetch all shards of a checkpoint, then copy and upload it; runs in a thread."""
        began = time.monotonic()
        written_s = max(source.seconds for source in sources)
        info: CheckpointInfo | None = None
        problems: list[str] = []
        try:
            received = self._receive_all(shards, sources)
            seconds = time.monotonic() - began + written_s
            info = self._store.add(received, seconds)
            if info.not_finite:
                problems.append(warning_of_not_finite(info))
            problems += self._copy(info)
            place = str(info.path)
            try:
                place = self._store.upload(info)
            except CheckpointError as error:
                problems.append(f"a checkpoint is in the run folder alone: {error}")
            self._tell(info, place, sources)
        except (HvdElasticError, OSError) as error:
            problems.append(f"the checkpoint of step {shards[0].step} was not kept: {error}")
        finally:
            self._post(lambda: self._ended(shards[0].key, info, problems))

    def _receive_all(
        self, shards: Sequence[ShardInfo], sources: Sequence[_Source]
    ) -> list[ShardInfo]:
        folder = self._store.folder
        there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()

        def receive(shard: ShardInfo) -> ShardInfo:
            error: HvdElasticError | None = None
            for source in sources:
                if source.shard.file == shard.file:
                    try:
                        return receive_shard(folder, shard, _reading(source))
                    except HvdElasticError as failure:
                        error = failure
            raise error or CheckpointError(f"no host has shard {shard.index}")

        with ThreadPoolExecutor(min(_AT_ONCE, len(shards))) as pool:
            futures = [pool.submit(receive, shard) for shard in shards]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for shard in shards:
                if shard.file not in there:
                    (folder / shard.file).unlink(missing_ok=True)
            raise

    def _tell(self, info: CheckpointInfo, place: str, sources: Sequence[_Source]) -> None:
        event = Checkpoint(
            step=info.step,
            path=place,
            bytes=info.bytes,
            seconds=round(info.seconds, 3),
            blocked_s=round(max(source.blocked_s for source in sources), 6),
            shards=len(info.shards),
            not_finite=info.not_finite,
        )
        self._post(lambda: self._emit(event))

    def _copy(self, info: CheckpointInfo) -> list[str]:
        """Copy each shard to other hosts; return a message for each failure."""
        problems = []
        agents = dict(self._agents())
        spools = {host: agent.info.spool for host, agent in agents.items() if agent.info}
        for shard in info.shards:
            others = _others(list(spools), shard.host, self._copies)
            if len(others) < self._copies:
                problems.append(
                    f"a checkpoint has fewer copies than --checkpoint-copies {self._copies}: "
                    f"only {len(others)} other hosts are up"
                )
            for host in others:
                spool = spools[host]
                described = self._store.folder / f".tmp-description-{shard.sha256[:12]}"
                try:
                    agents[host].put(shard.path, f"{spool}/{shard.file}")
                    described.write_bytes(encode(shard.manifest()))
                    agents[host].put(described, f"{spool}/{Path(shard.file).stem}.json")
                except (HvdElasticError, OSError) as error:
                    problems.append(f"a copy of a checkpoint was not made: {error}")
                finally:
                    described.unlink(missing_ok=True)
        return list(dict.fromkeys(problems))

    def _ended(self, key: Key, info: CheckpointInfo | None, problems: Sequence[str]) -> None:
        self._working = False
        sources = self._known.pop(key, [])
        if info is not None:
            self._missed, self._writable = None, True
            self.newest_step, self.newest_s = info.step, info.seconds
            if not info.not_finite or self.resume_step < 0:
                self.resume_step = info.step
            self.expected = f"that of step {info.step} was written"
            # Older incomplete checkpoints are no longer needed.
            self._known = {k: s for k, s in self._known.items() if k[0] > info.step}
            self._release(self.resume_step - 1 if self._copies else info.step)
        else:
            why = "; ".join(problems) or f"the checkpoint of step {key[0]} was not kept"
            self._missed = _Missed(key, sources, why)
            self._release(key[0] - 1)  # the hosts keep the newest
            if key[0] <= self.newest_step:
                problems = ()  # an earlier leader had already collected this one
        if not problems:
            self._complaints.clear()
        for problem in problems:
            self._complain(problem)
        self._begin()
        if not self._working:
            self._idle.set()
            self._on_idle()

    def _release(self, up_to_step: int | None) -> None:
        for agent in self._agents().values():
            agent.send(Collected(up_to_step))

    def leaving(self, agent: HostFiles) -> None:
        """Let an agent delete its spool, because its host leaves the run."""
        agent.send(Collected(None))

    def end(self, *, succeeded: bool, searched_in_vain: bool) -> None:
        """Let all hosts delete their spools at the end of the run, unless they may be needed.

        Args:
            succeeded: whether the run has.
            searched_in_vain: whether a checkpoint that should exist was not found.
        """
        needed = self._copies or self._missed or self.busy or searched_in_vain
        if succeeded or not (needed or not self._writable):
            self._release(None)

    # -- restoring -------------------------------------------------------------------------

    def goes_on_from(self, newest: CheckpointInfo | None) -> None:
        """Forget the shards of other histories: training continues from this checkpoint."""
        self._accepting = False
        self._known.clear()
        self._missed = None
        self.newest_step = self.resume_step = -1 if newest is None else newest.step
        # A later takeover must not use shards of a history that training has abandoned.
        self._release(None)

    @property
    def why_missed(self) -> str:
        """Return why the newest checkpoint could not be collected; empty: it was."""
        return self._missed.why if self._missed else ""

    def collect_rest(self) -> None:
        """Wait until what the hosts still have is collected; called from another thread."""
        self._idle.wait()  # shards of an earlier leader may still be being collected
        if self._missed:
            self._idle.clear()
            self._post(self._collect_missed)
            self._idle.wait()

    def _collect_missed(self) -> None:
        """Try again to collect the missed checkpoint from the hosts that are still up."""
        agents, missed = self._agents(), self._missed
        if missed is not None:
            there = [source for source in missed.sources if agents.get(source.host) is source.agent]
            if complete_sets(source.shard for source in there):
                self._known[missed.key] = there
        self._missed = None
        self._begin()
        if not self._working:
            self._idle.set()


def _reading(source: _Source) -> Callable[[HashingWriter], None]:
    return lambda writer: source.agent.receive(source.remote, writer.write)


def _others(hosts: Sequence[str], own: str, count: int) -> list[str]:
    """Return the ``count`` hosts after ``own`` in cyclic order.

    >>> _others(["a", "b", "c"], "b", 2)
    ['c', 'a']
    """
    at = hosts.index(own) + 1 if own in hosts else 0
    return [host for host in [*hosts[at:], *hosts[:at]] if host != own][:count]
