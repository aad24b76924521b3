"""Sends the newest checkpoint to one of the workers' hosts, for a restart."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from hvd_elastic.checkpoint.checkpoint_collector import CheckpointCollector
from hvd_elastic.checkpoint.manifests import CheckpointInfo
from hvd_elastic.checkpoint.place import CheckpointStore
from hvd_elastic.checkpoint.spool_collector import HostFiles
from hvd_elastic.errors import HvdElasticError

_TRY_AGAIN_S = (1.0, 2.0, 5.0, 10.0, 15.0)
"""Delays before further attempts to send a checkpoint to a host [s]."""
_LOOK_S = 0.25
"""Time between checks during such a delay of whether the checkpoint is still needed [s]; short,
because the generation waits for the result."""


@dataclass(frozen=True)
class Brought:
    """The checkpoint that was sent to a host for a restart.

    Attributes:
        checkpoint: newest checkpoint; None: there is no complete one, or it could not be sent.
        host, manifest: host it was sent to, and path of its manifest there.
        error: why a checkpoint that exists, or may exist, could not be sent; empty: no error.
    """

    checkpoint: CheckpointInfo | None = None
    host: str = ""
    manifest: str = ""
    error: str = ""


class CheckpointSender:
    """Sends checkpoints of one run to its hosts; its methods are called from the leader's loop.

    Args:
        collector: collects them; what the hosts still have is waited for.
        post: schedules a call in the leader's loop.

    Attributes:
        restored_from: manifest of the checkpoint that the workers last restored.
        searched_in_vain: whether a checkpoint that should exist was not found when last looked for.
    """

    def __init__(
        self,
        store: CheckpointStore,
        collector: CheckpointCollector,
        *,
        agents: Callable[[], Mapping[str, HostFiles]],
        post: Callable[[Callable[[], None]], None],
        warn: Callable[[str], None],
    ) -> None:
        self._store = store
        self._collector = collector
        self._agents = agents
        self._post = post
        self._warn = warn
        self.restored_from = ""
        self.searched_in_vain = False

    def bring(
        self,
        hosts: Sequence[str],
        name: str,
        wanted: Callable[[], bool],
        done: Callable[[Brought], None],
    ) -> None:
        """Start a thread that sends the newest complete checkpoint to one of the workers' hosts.

        Args:
            hosts: hosts of the workers; the first one that can receive it is used.
            name: name of the folder to create in its spool.
            wanted: returns whether the checkpoint is still needed; called from any thread.
            done: called with the result, in the leader's loop.
        """

        def run() -> None:
            brought = self._keep_trying(hosts, name, wanted)
            called_off = not wanted()
            self._post(lambda: tell(brought))
            agent = self._agents().get(brought.host)
            if called_off and agent is not None:  # no worker loads it, and removes it then
                with contextlib.suppress(HvdElasticError):
                    agent.discard(str(PurePosixPath(brought.manifest).parent))

        def tell(brought: Brought) -> None:
            if not brought.error and wanted():  # else a newer generation may be training already
                newest = brought.checkpoint
                self.restored_from = "" if newest is None else str(newest.path)
                self._collector.goes_on_from(newest)
            else:
                self._collector.restart_failed(wanted)
            done(brought)

        threading.Thread(target=run, name="restore", daemon=True).start()

    def _keep_trying(self, hosts: Sequence[str], name: str, wanted: Callable[[], bool]) -> Brought:
        said: set[str] = set()

        def say(message: str) -> None:
            if message not in said:
                said.add(message)
                self._post(lambda: self._warn(message))

        brought = self._try_to_bring(hosts, name, wanted, say)
        for wait_s in _TRY_AGAIN_S:
            if not brought.error:
                break
            say(f"{brought.error}; trying again")
            end = time.monotonic() + wait_s
            while wanted() and time.monotonic() < end:
                time.sleep(_LOOK_S)
            if not wanted():
                break
            brought = self._try_to_bring(hosts, name, wanted, say)
        return brought

    def _try_to_bring(
        self,
        hosts: Sequence[str],
        name: str,
        wanted: Callable[[], bool],
        say: Callable[[str], None],
    ) -> Brought:
        try:
            self._collector.collect_rest(wanted)
            newest = self._store.newest(say)
        except (HvdElasticError, OSError) as error:
            return Brought(error=f"no checkpoint can be looked for: {error}")
        self.searched_in_vain = newest is None and bool(self._collector.expected)
        if newest is None:
            return Brought(error=self._collector.why_missed or self._why_none())
        failed: dict[str, str] = {}
        for host in hosts:
            agent = self._agents().get(host)
            if agent is None or agent.info is None:
                failed[host] = f"host {host} is gone"
                continue
            folder = f"{agent.info.spool}/{name}"
            try:
                for path in newest.files:
                    agent.put(path, f"{folder}/{path.name}")
            except (HvdElasticError, OSError) as error:
                failed[host] = str(error)
                with contextlib.suppress(HvdElasticError):
                    agent.discard(folder)
                continue
            for problem in failed.values():
                say(f"{problem}; the workers take the checkpoint from host {host}")
            return Brought(newest, host, f"{folder}/{newest.path.name}")
        problems = "; ".join(dict.fromkeys(failed.values()))
        return Brought(error=f"checkpoint {newest.path} cannot be brought to any host: {problems}")

    def _why_none(self) -> str:
        """Return why it is an error that no checkpoint was found; empty: none was expected."""
        expected = self._collector.expected
        if not expected:
            return ""
        return (
            f"no whole checkpoint of run {self._store.run_id} is found in {self._store}, though "
            f"{expected}: that place is not mounted, or its files are gone or damaged"
        )
