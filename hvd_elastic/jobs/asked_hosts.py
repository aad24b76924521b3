"""Ask hosts of a cluster something in the background, by a command on each of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from hvd_elastic.json_text import parse_json

_LIMIT_S = 10.0
"""How long it may take to log in, and all hosts together [s]."""


class AskedHosts:
    """A command that runs on some hosts.

    Args:
        hostfile: hostfile of the cluster.
        ssh_config: its ssh configuration; None: the user's own.
        hosts: names of the hosts.
        command: shell text.
    """

    def __init__(
        self, hostfile: Path, ssh_config: str | None, hosts: Collection[str], command: str
    ) -> None:
        self.hosts = [*hosts]
        self._output = os.fdopen(os.memfd_create("answers"), "w+b")  # needs no disk
        limit = f"{_LIMIT_S:g}"
        options = [] if ssh_config is None else ["--ssh-config", ssh_config]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "hvd_elastic.cli.app", "cluster", "run"),
                *(str(hostfile), "--hosts", ",".join(hosts), "--no-stdin", "--json"),
                *("--connect-timeout", limit, "--total-timeout", limit, *options, command),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.DEVNULL,
        )

    def answers(self) -> dict[str, str] | None:
        """Return what the command printed on each host on which it succeeded; None: not yet."""
        if self._process.poll() is None:
            return None
        found = {}
        with self._output:
            self._output.seek(0)
            for line in self._output:
                with contextlib.suppress(ValueError):
                    entry = parse_json(line)
                    if entry.get("kind") == "host" and entry.get("state") == "ok":
                        found[str(entry.get("host"))] = str(entry.get("stdout", ""))
        return found

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._output.close()
