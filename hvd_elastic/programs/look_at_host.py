"""Describe a host: Python, packages, folders, limits, interfaces, name lookup, code and GPUs.

Input (JSON on stdin): {"packages": [import names], "folders": [paths], "names": [host names],
"code": a path or null}. Output: a JSON object with the fields set at the end of `main`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import platform
import re
import resource
import shutil
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

from hvd_elastic.programs.busy import BusyProcesses
from hvd_elastic.programs.hardware import read_hardware
from hvd_elastic.programs.nvidia import ask_nvidia_smi
from hvd_elastic.programs.usable import usable_cores, usable_memory

SIOCGIFADDR = 0x8915
# Limit for all name lookups together, since a resolver can block for much longer.
RESOLVE_S = 3.0
GPU_FIELDS = (
    "index", "name", "driver_version", "memory.total", "memory.used",
)  # fmt: skip
# Maximum number of files of code that are compared.
MOST_FILES = 2000
HOROVOD_BUILD = "horovod build"
NOT_CODE = ("node_modules", "__pycache__", "site-packages")


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None; avoids importing heavy packages."""
    try:
        if package == HOROVOD_BUILD:
            return horovod_build()
        if util.find_spec(package) is None:
            return None
        # Its import is fast, and also finds the version of a source tree that is not installed.
        if package == "hvd_elastic":
            return str(importlib.import_module(package).__version__)
        # importlib.metadata needs Python 3.8; the leader reports an older Python anyway.
        from importlib import metadata

        try:
            return metadata.version(package.replace("_", "-"))
        except metadata.PackageNotFoundError:
            return metadata.version(f"{package}-cpu")  # as for TensorFlow
    except ImportError:
        return "unknown"
    except Exception as error:  # noqa: BLE001  # whatever error a broken package raises is reported
        return f"broken ({type(error).__name__}: {error})"


def horovod_build() -> str | None:
    """Return what the installed Horovod was compiled for, where ``build-horovod`` has made it."""
    from importlib import metadata

    try:
        name = metadata.distribution("horovod").read_text("HVD_ELASTIC_BUILD") or ""
    except metadata.PackageNotFoundError:
        return None
    parts = re.findall(r"-(torch|tensorflow|cuda|patch)-([^-\s]+)", name)
    return ", ".join(" ".join(part) for part in parts) or None


def cuda_of_torch() -> str | None:
    """Return the CUDA version that PyTorch was built for, without importing PyTorch."""
    with contextlib.suppress(Exception):
        spec = util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            for line in Path(spec.origin).with_name("version.py").read_text().splitlines():
                if line.startswith("cuda"):
                    return line.rpartition("=")[2].strip().strip("'\"").replace("None", "") or None
    return None


def look_at_folder(folder: str) -> dict[str, Any]:
    """Return the free bytes of a folder (which may not exist yet) and why it is not writable."""
    path = Path(folder).expanduser()
    # Path.exists raises PermissionError below a folder that this user may not enter
    while not os.path.exists(str(path)) and path != path.parent:  # noqa: PTH110
        path = path.parent
    found: dict[str, Any] = {"free": None, "refused": None}
    try:
        found["free"] = shutil.disk_usage(str(path)).free
        with tempfile.TemporaryFile(dir=str(path)) as file:
            file.write(bytes(4096))
    except OSError as error:
        found["refused"] = error.strerror or str(error)
    return found


def interfaces() -> dict[str, dict[str, Any]]:
    """Return addresses, MTU and state of each network interface."""
    found: dict[str, dict[str, Any]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            folder = Path("/sys/class/net", name)
            entry: dict[str, Any] = {"addresses": [], "mtu": None, "up": False}
            with contextlib.suppress(OSError, ValueError):
                entry["mtu"] = int((folder / "mtu").read_text())
                entry["up"] = bool(int((folder / "flags").read_text(), 16) & 1)
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, request)
                entry["addresses"].append(socket.inet_ntoa(answer[20:24]))
            found[name] = entry
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            words = line.split()
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))
            found.setdefault(words[5], {"addresses": [], "mtu": None, "up": True})
            found[words[5]]["addresses"].append(address)
    return found


def resolve(names: list[str]) -> dict[str, list[str] | None]:
    """Return the addresses of each name; [] if unknown, None if there was no answer in time."""
    found: dict[str, list[str] | None] = dict.fromkeys(names)

    def ask(name: str) -> None:
        try:
            entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found[name] = sorted({str(entry[4][0]) for entry in entries})
        except (OSError, UnicodeError):
            found[name] = []

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in found]
    for thread in threads:
        thread.start()
    waited = threading.Event()
    timer = threading.Timer(RESOLVE_S, waited.set)
    timer.daemon = True
    timer.start()
    for thread in threads:
        while thread.is_alive() and not waited.is_set():
            thread.join(0.05)
    timer.cancel()
    return dict(found)


def code_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files of a folder, without hidden files and virtual environments."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in NOT_CODE or path.is_symlink():
            continue
        if path.is_dir():
            if not (path / "pyvenv.cfg").exists():
                yield from code_files(path)
        elif path.suffix == ".py":
            yield path


def digest_of(path: Path) -> dict[str, str] | None:
    """Return digests of a folder's Python files (or of one file) by name; None if missing."""
    found = {}
    try:
        files = [path] if path.is_file() else code_files(path) if path.is_dir() else None
        if files is None:
            return None
        for file in files:
            name = file.name if file == path else file.relative_to(path).as_posix()
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
            if len(found) >= MOST_FILES:
                break
    except OSError as error:
        return {"": error.strerror or str(error)}
    return found


def package_code() -> dict[str, str] | None:
    """Return the digests of this package's files, where the interpreter finds it."""
    with contextlib.suppress(ImportError, ValueError):
        spec = util.find_spec("hvd_elastic")
        if spec is not None and spec.origin is not None:
            return digest_of(Path(spec.origin).parent)
    return None


def gpus() -> dict[str, Any]:
    """Return the fields that nvidia-smi reports for each GPU, and its error."""
    answer = ask_nvidia_smi(f"--query-gpu={','.join(GPU_FIELDS)}")
    if answer is None:
        return {"gpus": [], "gpu_error": None}
    found, problems = [], []
    for line in answer.lines:
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(GPU_FIELDS):
            found.append({name: words[at] for at, name in enumerate(GPU_FIELDS)})
        else:
            # For example "Unable to determine the device handle for GPU 0000:1C:00.0: GPU is lost".
            problems.append(line)
    return {"gpus": found, "gpu_error": [*problems, answer.error][0] or None}


def main() -> None:
    """Read the request and write the answer."""
    busy = BusyProcesses()
    request = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    temporary = tempfile.gettempdir()
    folders = dict.fromkeys(["~", temporary, *request["folders"]])
    code = request["code"]
    connection = os.environ.get("SSH_CONNECTION", "").split()
    own_name = platform.node()
    resolved = resolve([*request["names"], own_name])
    answer: dict[str, Any] = {
        "name": own_name,
        "own_addresses": resolved[own_name],
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {package: version_of(package) for package in request["packages"]},
        "cuda": cuda_of_torch(),
        "folders": {folder: look_at_folder(folder) for folder in folders},
        "memory": usable_memory()._asdict(),
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "infiniband": Path("/sys/class/infiniband").is_dir()
        and any(Path("/sys/class/infiniband").iterdir()),
        "interfaces": interfaces(),
        "address": connection[2] if len(connection) == 4 else None,
        "resolved": {name: resolved[name] for name in request["names"]},
        "code": None if code is None else digest_of(Path(code)),
        "package_code": package_code(),
        **gpus(),
        "hardware": read_hardware(),
        "cpus": usable_cores(),
        "busy": busy.find(),
    }
    sys.stdout.write(json.dumps(answer))
