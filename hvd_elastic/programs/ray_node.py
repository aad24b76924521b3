"""Start, describe and end the node of a Ray cluster on this host.

Input (JSON on stdin): {"do": "start" | "look" | "end", "cluster": its mark, "folder": path}, for
"start" also {"token", "head": "address:port" or null to be the head, "port": of the head or 0,
"address": own address or null for the one that ssh has reached, "options": [words for `ray start`],
"env": {variables}}.
Output: {"error": text}, or for "start" {"address", "client", "ray", "python", "new"}, for "look"
{"state": "up" | "broken" | "down", "processes", "bytes"}, for "end" {"ended", "left"}.

All processes of the cluster have its mark in their environment, so none of another Ray cluster is
taken for one of them. `ray stop` ends those of all clusters of the user, and is not used.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from hvd_elastic.programs.kill_run import find as find_marked
from hvd_elastic.programs.processes import (
    Process,
    all_processes,
    command_line,
    end_processes,
    read,
)

MARK = "HVD_ELASTIC_RAY_CLUSTER"
TOKEN = "token"
STARTED = "started.json"
# First release with tokens; without, whoever reaches a port of Ray runs code.
LEAST_RAY = (2, 52)
START_S = 120.0
# Time for TERM: a node takes its leave of the cluster.
GRACE_S = 5.0
# Python workers of Ray write their title over the environment that they were started with, where
# the mark is read, unless this is set.
KEEP_ENVIRONMENT = {"SPT_NOENV": "1"}
HEAD_PROCESS, NODE_PROCESS = "gcs_server", "raylet"


def find(cluster: str) -> list[Process]:
    """Return the processes of the cluster on this host, with all that they have started."""
    return list(find_marked(cluster, variable=MARK))


def is_program(process: Process, name: str) -> bool:
    """Return whether a process runs this program of Ray."""
    return Path(command_line(process.pid).split(" ")[0]).name == name


def why_unusable() -> str:
    """Return why Ray cannot be started with this interpreter; "" if it can."""
    from importlib import metadata, util

    if util.find_spec("ray") is None:
        return (
            f"{sys.executable} has no package ray. Install it there (pip install "
            "'ray[client,data,train]' cloudpickle), or name another interpreter with --python"
        )
    version = metadata.version("ray")
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST_RAY:
        return (
            f"Ray {version} at {sys.executable} has no tokens, so whoever reaches one of its ports "
            f"could run code. Install {'.'.join(map(str, LEAST_RAY))} or newer"
        )
    return ""


def who_listens(port: int) -> str:
    """Return which Ray cluster has this port, in words; "" if none is found."""
    for pid in all_processes():
        words = command_line(pid, 4096)
        if HEAD_PROCESS in words and f"={port} " in f"{words} ":
            return f": the Ray cluster of process {pid} is there already"
    return ""


def free_port(address: str, wanted: int = 0) -> int:
    """Return a port that is free at the address now; OSError if the wanted one is not."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind((address, wanted))
        return int(free.getsockname()[1])


def make_folder(request: dict[str, Any]) -> None:
    """Make the cluster's folder, for this user alone, with its token.

    Ray opens its own folder and sockets in it to all users.
    """
    folder = Path(request["folder"])
    folder.mkdir(mode=0o700)  # fails if another user has made it
    (folder / TOKEN).touch(mode=0o600)
    (folder / TOKEN).write_text(request["token"], encoding="ascii")


def start_node(request: dict[str, Any]) -> dict[str, Any]:
    """Start a node of the cluster, unless there is one."""
    folder = Path(request["folder"])
    noted = folder / STARTED
    if any(is_program(process, NODE_PROCESS) for process in find(request["cluster"])):
        try:
            answer, head = json.loads(noted.read_text(encoding="ascii"))
        except FileNotFoundError:
            told = "a node of this cluster that was not started to its end"
            return {"error": f"{told} is there. End it first with: hvd-elastic ray down HOSTFILE"}
        if head == request["head"]:  # else the head that it belongs to has ended
            return {**answer, "new": False}
    problem = why_unusable()
    if problem:
        return {"error": problem}
    end_cluster(request)  # what a node that has died left
    connection = os.environ.get("SSH_CONNECTION", "").split(" ")
    address = request["address"] or (connection[2] if len(connection) == 4 else "127.0.0.1")
    try:
        port = free_port(address, request["port"]) if request["head"] is None else 0
    except OSError as error:
        taken = who_listens(request["port"])
        return {"error": f"port {request['port']} of {address}: {error.strerror}{taken}"}
    client = free_port(address)
    make_folder(request)
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--node-ip-address", address]
    if request["head"] is None:
        words += ["--head", "--port", str(port), "--temp-dir", str(folder / "ray")]
        words += ["--ray-client-server-port", str(client), "--include-dashboard=false"]
    else:
        words += ["--address", request["head"]]
    for name in ("--dashboard-agent-listen-port", "--metrics-export-port"):
        words += [name, str(free_port(address))]
    # Any free ports: the usual ones may be those of another cluster.
    words += ["--min-worker-port=0", "--max-worker-port=0", *request["options"]]
    answer = {
        "address": f"{address}:{port}" if port else address,
        "client": f"{address}:{client}",
        "ray": __import__("ray").__version__,
        "python": platform.python_version(),
    }
    # Before the start, so that a node whose start is interrupted is known.
    noted.write_text(json.dumps([answer, request["head"]]), encoding="ascii")
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={**os.environ, **KEEP_ENVIRONMENT, **request["env"], MARK: request["cluster"]},
            timeout=START_S,
        )
    except subprocess.TimeoutExpired:
        end_cluster(request)
        return {"error": f"ray start has not ended in {START_S:g} s"}
    if done.returncode:
        said = done.stdout.decode("utf-8", "replace").strip().splitlines()
        end_cluster(request)
        return {"error": "ray start failed: " + " ".join(line.strip() for line in said[-3:])}
    return {**answer, "new": True}


def describe_node(request: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the node."""
    found = find(request["cluster"])
    wanted = [NODE_PROCESS, *([HEAD_PROCESS] if request["is_head"] else [])]
    is_up = all(any(is_program(process, name) for process in found) for name in wanted)
    pages = [read(process.pid, "statm").split() for process in found]
    resident = sum(int(fields[1]) - int(fields[2]) for fields in pages if len(fields) > 2)
    return {
        "state": "up" if is_up else "broken" if found else "down",
        "processes": len(found),
        "bytes": resident * os.sysconf("SC_PAGE_SIZE"),
    }


def end_cluster(request: dict[str, Any]) -> dict[str, Any]:
    """End all processes of the cluster on this host, and remove its folder."""
    how = end_processes(lambda: find(request["cluster"]), GRACE_S)
    left = [pid for (pid, _), ended in how.items() if ended == "left"]
    if not left:
        shutil.rmtree(request["folder"], ignore_errors=True)
    return {"ended": len(how) - len(left), "left": left}


def main() -> None:
    """Read the request, carry it out, and write the answer."""
    request = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    try:
        answer = {"start": start_node, "look": describe_node, "end": end_cluster}[request["do"]](
            request
        )
    except (OSError, subprocess.SubprocessError) as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
