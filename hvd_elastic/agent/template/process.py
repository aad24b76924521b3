"""Runs in the template: imports modules, and forks workers that run the training script.

The agent starts it with the interpreter, the options, the folder and the environment of a worker,
and the program on standard input, so that a fork differs from a worker that was started directly
in its arguments and a few variables only. A fork is orphaned at once, whereby the agent, which is a
child subreaper, becomes its parent.

Modules are imported in a thread: it can have a low priority without a way back, and threads that
libraries such as OpenMP keep for their caller end with it. Where the kernel groups processes by
session, priorities count within a group only, so the template's group is given a low one too, for a
minute at most and until all is imported: a fork of a low group would take seconds where ranks use
all cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hvd_elastic.agent.worker_start import OWN_VARIABLES, PLACEHOLDER

TITLE = "hvd-template"
"""Name of a template's main thread, as in ``ps -o comm``, once workers can be forked."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")
_MAIN_NAMES = frozenset(
    f"__{name}__"
    for name in ("name", "doc", "package", "loader", "spec", "annotations", "builtins")
)
_LOW_PRIORITY = 10
"""Niceness of the imports. At 19, the lowest, they would hardly end where ranks use all cores."""
_LOW_PRIORITY_S = 60.0
"""Time after which the imports continue at normal priority [s]: where many more processes than
cores want the processor, they would hardly end, and workers would be started without a template."""
_GROUP_PRIORITY = Path("/proc/self/autogroup")
"""Priority of this session among those that want the processor; see sched(7), "The autogroup
feature". Missing if the kernel has none."""
_GROUP_TRIES, _GROUP_PAUSE_S = 3, 0.15
"""The kernel lets one process in a tenth of a second change it, of those without privileges."""
_REQUEST_BYTES = 1 << 16
_THREADS_END_S, _BUSY_THREADS_END_S = 1.0, 30.0
"""Time for threads that end to do so: those that wait, and those that run or wait for a core."""
_FORKED_WELL = frozenset({"jemalloc_bg_thd"})
"""Threads that live with a fork: jemalloc, part of pyarrow, locks its own and starts it again."""


def main(modules: Sequence[str], program: Sequence[str]) -> None:
    """Import modules, tell the agent whether workers can be forked, and fork them on request.

    Returns in each worker when its script has ended.

    Args:
        modules: names of the modules to import, in order.
        program: the script, or ``-m`` and a module, and its arguments.
    """
    agent = os.getppid()
    # Output, if imports print any, goes where errors go.
    control = socket.socket(fileno=os.dup(1))
    os.dup2(2, 1)
    name = _read("comm").strip()
    trouble = _import(modules) or _trouble()
    if trouble:
        control.sendall(trouble.encode())
        os._exit(1)
    gc.collect()
    gc.freeze()  # so that a worker's garbage collector does not copy the memory that all share
    ctypes.CDLL(None).prctl(_PR_SET_NAME, TITLE.encode())
    control.sendall(b"\0")
    while True:
        variables, files, *_ = socket.recv_fds(control, _REQUEST_BYTES, 2)
        if not variables:
            os._exit(0)  # the agent needs no more workers
        _flush()
        if _fork(files):
            for file in files:
                os.close(file)
            continue
        control.close()
        _become_worker(agent, name, variables.decode().split("\0"), files)
        _run(program)
        return


# -- imports -----------------------------------------------------------------------------------


def _import(modules: Sequence[str]) -> str:
    """Import modules in a thread of low priority; return what went wrong."""
    trouble = ""

    def work() -> None:
        nonlocal trouble
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
        for name in modules:
            try:
                importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001  # SystemExit too
                trouble = f"the import of {name} failed: {type(error).__name__}: {error}"
                return

    _set_group_priority(_LOW_PRIORITY)
    thread = threading.Thread(target=work, name="imports")
    thread.start()
    thread.join(_LOW_PRIORITY_S)
    with contextlib.suppress(OSError):  # it has ended, or only the superuser may raise it
        os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, 0)
    _set_group_priority(0)
    thread.join()
    return trouble


def _set_group_priority(priority: int) -> None:
    for _ in range(_GROUP_TRIES):
        try:
            _GROUP_PRIORITY.write_text(str(priority))
        except BlockingIOError:
            time.sleep(_GROUP_PAUSE_S)
        except OSError:  # the kernel does not group processes
            return
        else:
            return


def _trouble() -> str:
    """Return why this process must not be forked; empty: it may."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            device = str(link.readlink())
        except OSError:  # the one that lists the folder
            continue
        if device.startswith(_GPU_DEVICES):
            return f"the imports use the GPU ({device})"
    # Libraries with fork handlers, such as OpenBLAS, end their threads before a fork.
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    began = time.monotonic()
    while True:
        waited_s = time.monotonic() - began  # before the look, which may be late
        threads = {each for each in _other_threads() if each[0] not in _FORKED_WELL}
        if not threads:
            return ""
        is_busy = "R" in (state for _, state in threads)
        if waited_s > (_BUSY_THREADS_END_S if is_busy else _THREADS_END_S):
            names = sorted({name for name, _ in threads})
            return f"the imports start threads ({', '.join(names)})"
        time.sleep(0.01)


def _other_threads() -> Iterator[tuple[str, str]]:
    """Yield name and state of all threads of this process but the main one.

    The state is that of proc_pid_stat(5): R if it runs or waits for a core.
    """
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has just ended
                name, _, rest = _read(f"task/{task.name}/stat").rpartition(b") ")
                yield name.partition(b"(")[2].decode(errors="replace").strip(), chr(rest[0])


# -- fork --------------------------------------------------------------------------------------


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _fork(files: Sequence[int]) -> bool:
    """Fork an orphan; return True in this process, and False in the orphan once it is one."""
    orphaned, still_child = os.pipe()
    between = _try_to_fork(files)
    if between == 0:
        if _try_to_fork(files) != 0:
            os._exit(0)
        os.close(still_child)
        os.read(orphaned, 1)  # ends when the template has seen the end of the process between
        os.close(orphaned)
        return False
    if between is not None:
        os.waitpid(between, 0)
    os.close(orphaned)
    os.close(still_child)
    return True


def _try_to_fork(files: Sequence[int]) -> int | None:
    """Fork; if that is not possible, send the agent the reason and return None."""
    try:
        return os.fork()
    except OSError as error:
        os.write(files[1], str(error).encode())
        return None


def _become_worker(agent: int, name: bytes, variables: Sequence[str], files: Sequence[int]) -> None:
    """Give this process all that sets a worker apart from the template.

    Args:
        agent: process id of the agent.
        name: name of the main thread of a worker.
        variables: values of :data:`OWN_VARIABLES`.
        files: descriptors of the output, and of a socket to the agent for the process id.
    """
    output, started = files
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)
    libc.prctl(_PR_SET_NAME, name)
    del os.environ[PLACEHOLDER]
    os.environ.update(zip(OWN_VARIABLES, variables, strict=True))
    own = "".join(f"{key}={os.environ[key]}\0" for key in OWN_VARIABLES)
    begin = _read("environ").find(f"\0{PLACEHOLDER}=".encode()) + 1
    _write_area(_ENVIRONMENT, begin, os.fsencode(own))
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # as the random module does by itself
    importlib.invalidate_caches()
    os.write(started, str(os.getpid()).encode())
    if not os.read(started, 1):
        os._exit(1)  # the agent has waited too long
    os.close(started)


# -- memory that ps shows ----------------------------------------------------------------------

_ARGUMENTS, _ENVIRONMENT = 45, 47
"""Places of begin and end of these areas of memory in /proc/self/stat, after the name."""


def _read(name: str) -> bytes:
    return Path("/proc/self", name).read_bytes()


def _write_area(area: int, begin: int, data: bytes) -> None:
    """Write to the memory that the kernel shows as arguments or environment of this process.

    Args:
        area: place of the area in /proc/self/stat.
        begin: offset in the area, after which it is cleared.
        data: content, cut to the size of the area.
    """
    start, end = map(int, _read("stat").rpartition(b")")[2].split()[area : area + 2])
    room = end - start - begin
    if start and room > 0:
        ctypes.memmove(start + begin, data[: room - 1].ljust(room, b"\0"), room)


# -- script ------------------------------------------------------------------------------------


def _run(program: Sequence[str]) -> None:
    """Run the program as the interpreter does that is started with it."""
    words = _read("cmdline").split(b"\0")[:-1]
    command = [*words[: -len(sys.argv)], *map(os.fsencode, program)]
    _write_area(_ARGUMENTS, 0, b"".join(word + b"\0" for word in command))
    sys.orig_argv = [os.fsdecode(word) for word in command]
    is_module = program[0] == "-m"
    sys.argv = ["-m", *program[2:]] if is_module else list(program)
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, str(Path.cwd() if is_module else Path(program[0]).resolve().parent))
    old = vars(sys.modules["__main__"])
    # A new one, since the garbage collector leaves what the template has frozen: the script's
    # objects, such as a bar of tqdm, would be ended after the modules that they need.
    main = sys.modules["__main__"] = ModuleType("__main__")
    names: dict[str, Any] = vars(main)
    names.update({name: old[name] for name in old if name in _MAIN_NAMES})
    for name in old.keys() - _MAIN_NAMES:
        del old[name]
    try:
        if is_module:
            runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]
        else:
            # Unlike pathlib, the interpreter keeps "./".
            _run_script(os.path.join(os.getcwd(), program[0]), names)  # noqa: PTH109, PTH118
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  # as the interpreter does
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None


def _run_script(path: str, names: dict[str, Any]) -> None:
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    names.update(__file__=path, __cached__=None, __loader__=loader)
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, names)  # noqa: S102
