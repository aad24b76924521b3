"""Virtual hosts as the machines of a cloud: each boots with its machine, and dies with it."""

from __future__ import annotations

import http.server
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from hvd_elastic.programs.processes import Process, is_alive, read_process
from hvd_elastic.virtual import VirtualCluster
from hvd_elastic.virtual.processes import plain_environment
from hvd_elastic.virtual.sshfiles import HOST_KEY, make_keys

METADATA = "169.254.169.254"
"""Address of the metadata service on every machine of the large clouds."""
_SEEN = "/run/virtclust"
"""Path of a host's own folder inside the host."""
_TOKEN = "token-of-this-machine"


class Bodies:
    """Hosts of a virtual cluster, which are off until they are a machine.

    Args:
        cluster: cluster whose hosts are used; all of them are switched off.

    Attributes:
        fault: what is wrong with machines that boot: ``cut``, as by a security group without ssh,
            or ``no python``, as in a small image; empty: nothing.
    """

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster = cluster
        self.fault = ""
        self._first: dict[str, Process] = {}
        """First process of each machine's host."""
        self._started: list[subprocess.Popen[str]] = []
        for host in cluster.hosts:
            cluster.crash(host)

    def boot(
        self, host: str, user_data: str, public_keys: Iterable[str], metadata: Mapping[str, str]
    ) -> None:
        """Boot a host as a new machine: new host key, empty disk, user data run as root."""
        folder = self.cluster.folder / "hosts" / host
        shutil.rmtree(folder / "data")
        (folder / "data").mkdir()
        shutil.rmtree(folder / "metadata", ignore_errors=True)
        for path, text in metadata.items():
            self.put_metadata(host, path, text)
        (folder / "user-data").write_text(user_data or "#!/bin/sh\n")
        for name in (HOST_KEY, f"{HOST_KEY}.pub"):
            (folder / name).unlink(missing_ok=True)
        make_keys([folder / HOST_KEY])
        (folder / "authorized_keys").write_text("".join(f"{key.strip()}\n" for key in public_keys))
        self.cluster.boot(host)
        first = read_process(min(self.cluster.pids(host, system=True)))
        assert first is not None, f"{host} has ended as it booted"
        self._first[host] = first
        # What a script does to ~/.ssh of the machine must not reach that of this machine.
        prepare = (
            f"ip address add {METADATA}/32 dev lo; [ ! -d ~/.ssh ] || mount -t tmpfs none ~/.ssh"
        )
        done = self.cluster.run_on(host, ["sh", "-c", prepare])
        assert done.returncode == 0, done.stderr
        service = self._start(
            host, [sys.executable, str(Path(__file__).resolve()), f"{_SEEN}/metadata"]
        )
        assert service.stdout is not None
        assert service.stdout.readline() == "ready\n", f"no metadata service on {host}"
        if self.fault == "no python":
            hide = 'for each in $(which -a python3); do mount --bind /dev/null "$each"; done'
            self.cluster.run_on(host, ["sh", "-c", hide], env=plain_environment({}))
        self._start(host, ["sh", f"{_SEEN}/user-data"])
        if self.fault == "cut":
            self.cluster.cut(host)

    def _start(self, host: str, command: list[str]) -> subprocess.Popen[str]:
        folder = self.cluster.folder / "hosts" / host
        with (folder / "user-data.log").open("ab") as log:
            process = self.cluster.popen_on(
                host,
                command,
                env=plain_environment({}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def put_metadata(self, host: str, path: str, text: str) -> None:
        """Have the metadata service of a machine answer with a text."""
        target = self.cluster.folder / "hosts" / host / "metadata" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f".{target.name}")
        new.write_text(text)
        new.rename(target)

    def is_on(self, host: str) -> bool:
        """Return whether a machine runs, that is, has not shut itself down."""
        first = self._first.get(host)
        return first is not None and is_alive(first)

    def end(self, host: str) -> None:
        """Switch a machine off, as when its power fails; the host is free then."""
        if host in self._first:
            self.cluster.crash(host)
            del self._first[host]
        for process in [each for each in self._started if each.poll() is not None]:
            assert process.stdout is not None
            process.stdout.close()
            self._started.remove(process)


class _Metadata(http.server.BaseHTTPRequestHandler):
    """Version 2 of the service of AWS: the files of a folder, for those who have a token."""

    folder: Path

    def do_PUT(self) -> None:
        self._answer(200, _TOKEN if self.path == "/latest/api/token" else "")

    def do_GET(self) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") != _TOKEN:
            self._answer(401, "")
            return
        path = self.folder / self.path.removeprefix("/latest/meta-data/")
        found = path.is_file() and path.resolve().is_relative_to(self.folder)
        self._answer(200 if found else 404, path.read_text() if found else "")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


if __name__ == "__main__":
    _Metadata.folder = Path(sys.argv[1]).resolve()
    with http.server.ThreadingHTTPServer((METADATA, 80), _Metadata) as server:
        print("ready", flush=True)
        server.serve_forever()
