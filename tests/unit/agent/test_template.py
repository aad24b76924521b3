"""A worker that is forked from a template is as one that is started directly."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import importlib.util
import json
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_elastic.agent.template import process, template
from hvd_elastic.agent.template.template import Template, UnsuitableError, parse_python_command
from hvd_elastic.agent.worker_start import WorkerStart, start_process
from hvd_elastic.programs.hold_command import SUBREAPER, become_subreaper
from tests.paths import COSTLY, LIMIT_S

ROOT = Path(__file__).resolve().parents[3]
needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)

PROBE = """
import atexit, ctypes, gc, json, os, random, resource, signal, subprocess, sys, threading, time
import faulthandler
import beside
main = sys.modules["__main__"]
thread = threading.Thread(target=int)  # with the first one the C library catches signal 33
thread.start()
thread.join()
def status(name):
    with open("/proc/self/status") as file:
        return next(line.split(None, 1)[1] for line in file if line.startswith(name))
def read(name):
    with open("/proc/self/" + name, "rb") as file:
        return file.read()
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death))
found = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": repr(sys.flags),
    "warnoptions": sys.warnoptions, "xoptions": sys._xoptions, "executable": sys.executable,
    "environ": list(os.environ.items()),
    "ps": subprocess.run(["ps", "-ww", "-o", "comm=,args=,nice=", "-p", str(os.getpid())],
                         capture_output=True, text=True).stdout.split("\\n"),
    "cmdline": read("cmdline").decode(), "exe": os.readlink("/proc/self/exe"),
    "proc_environ": read("environ").rstrip(b"\\0").decode(),
    "handlers": {n: repr(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
    "masks": [status(name) for name in ("SigBlk", "SigIgn", "SigCgt", "ShdPnd")],
    "descriptors": {n: os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in range(3)},
    "number of descriptors": len(os.listdir("/proc/self/fd")),
    "cwd": os.getcwd(), "umask": os.umask(0o22), "parent": os.getppid(),
    "leads": os.getpid() == os.getsid(0) == os.getpgid(0), "death": death.value,
    "threads": [repr(type(t)) + t.name for t in threading.enumerate()],
    "tasks": len(os.listdir("/proc/self/task")),
    "main": {name: str(value).split(" object")[0] for name, value in vars(main).items()
             if name.startswith("__") and name not in ("__builtins__", "__spec__")},
    "spec": str(main.__spec__).split(" object")[0],
    "streams": [repr(s) for s in (sys.stdin, sys.stdout, sys.stderr)], "read": sys.stdin.read(),
    "buffered": [s.write_through for s in (sys.stdout, sys.stderr)],
    "limits": [resource.getrlimit(n) for n in range(16)], "oom": read("oom_score_adj").decode(),
    "cores": sorted(os.sched_getaffinity(0)), "policy": os.sched_getscheduler(0),
    "priority": os.getpriority(os.PRIO_PROCESS, 0),
    "group": os.path.exists("/proc/self/autogroup") and repr(read("autogroup").split()[1:]),
    "fault": faulthandler.is_enabled(),
    "order of a set": "".join(set("the letters of a text")),
    "depth of modules": __name__, "defined": sorted(n for n in vars(main) if n[0] != "_"),
    "frames": sys._getframe().f_code.co_filename,
}
print(json.dumps(found))
"""


async def run(start: WorkerStart, source: Template | None) -> tuple[str, int]:
    """Run a worker; return its output and its status."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    pid = start.run(write_end) if source is None else source.fork(start, write_end, 2 * LIMIT_S)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as output:
        if pid is None:
            return output.read().decode(), -1
        text = (await asyncio.to_thread(output.read)).decode()
    return text, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def variables(worker: str = "a:0.1", **further: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    own = {"HVD_ELASTIC_LOCAL_RANK": "0", "HVD_ELASTIC_WORKER": worker}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **further, **own}


async def ready(start: WorkerStart, modules: Sequence[str]) -> Template:
    """Return a template for such workers that is ready, or that has been given up."""
    source = Template()
    source.learn(start, modules, 0.0)
    source.warm()
    while source._process is not None and not source._process.is_ready:
        await asyncio.sleep(0.01)
    return source


def both_ways(
    command: Sequence[str], cwd: Path, modules: Sequence[str] = (), **further: str
) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return output and status of a worker that is started directly, and of one that is forked."""

    async def main() -> tuple[tuple[str, int], tuple[str, int]]:
        first = WorkerStart.of(command, str(cwd), variables("a:0.1", **further))
        source = await ready(first, modules)
        second = WorkerStart.of(command, str(cwd), variables("a:0.22", **further))
        try:
            return await run(second, None), await run(second, source)
        finally:
            source.close()

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def as_an_agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be the parent of orphans, and reap the templates."""
    started: list[int] = []

    def start(*arguments: Any) -> int:
        started.append(start_process(*arguments))
        return started[-1]

    monkeypatch.setattr(template, "start_process", start)
    monkeypatch.setattr(template, "_FORK_LIMIT_S", LIMIT_S)  # the machine may be busy
    become_subreaper()
    yield
    for pid in started:
        has_ended = select.select([os.pidfd_open(pid)], [], [], LIMIT_S)[0]
        os.kill(pid, signal.SIGKILL)  # a test that has failed keeps its socket open
        os.waitpid(pid, 0)
        assert has_ended
    ctypes.CDLL(None).prctl(SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/probe.py", "scripts/p.py", "module.py"):
        (tmp_path / name).write_text(PROBE)
    for place in (tmp_path, tmp_path / "scripts"):
        (place / "beside.py").write_text("")
    (tmp_path / "link.py").symlink_to(tmp_path / "scripts/probe.py")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["scripts/probe.py"],
        ["./scripts/../scripts/probe.py", "--option", "", "two words", "ü", "x" * 3000],
        ["-u", "-X", "dev", "-Wdefault", "-O", "link.py", "-m", "--", "-c"],
        ["-E", "-B", "scripts/p.py"],
        ["-m", "module", "a", "-b"],
        ["-s", "-m", "scripts.probe"],
    ],
)
def test_a_fork_sees_what_a_worker_sees_that_is_started_directly(
    folder: Path, words: list[str]
) -> None:
    further = {"PYTHONHASHSEED": "7"} if "-E" not in words else {"PYTHONSAFEPATH": ""}
    direct, forked = both_ways([sys.executable, *words], folder, ["json", "decimal"], **further)
    assert direct[1] == 0, direct[0]
    assert forked[1] == 0, forked[0]
    expected: dict[str, Any] = json.loads(direct[0])
    found: dict[str, Any] = json.loads(forked[0])
    orders = expected.pop("order of a set"), found.pop("order of a set")
    assert found == expected
    assert orders[0] == orders[1] or "-E" in words, "-E ignores the PYTHONHASHSEED of the run"


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("raise ValueError('no')", 1),
        ("def f():\n    g(1)\ndef g(x):\n    1 / 0\nf()", 1),
        ("import sys\nsys.exit('a reason')", 1),
        ("import sys\nsys.excepthook = lambda *_: print('my hook')\n{}['a']", 1),
        ("import atexit\natexit.register(print, 'at the end')\nraise SystemExit(7)", 7),
        ("x = (", 1),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("from __future__ import annotations\nprint(__annotations__)\nx: later", 0),
    ],
)
@pytest.mark.parametrize("way", [["train.py"], ["-m", "train"]])
def test_a_fork_ends_as_a_worker_that_is_started_directly(
    tmp_path: Path, script: str, status: int, way: list[str]
) -> None:
    (tmp_path / "train.py").write_text(script)
    direct, forked = both_ways([sys.executable, *way], tmp_path)
    assert direct[1] == status
    assert forked == direct


def test_a_fork_reads_the_script_and_what_lies_beside_it_anew(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import beside\nprint('old', beside.VALUE)\n")
    (tmp_path / "beside.py").write_text("VALUE = 1\n")
    start = WorkerStart.of([sys.executable, "train.py"], str(tmp_path), variables())

    async def main() -> tuple[str, int]:
        source = await ready(start, [])
        (tmp_path / "train.py").write_text("import beside\nprint('new', beside.VALUE)\n")
        (tmp_path / "beside.py").write_text("VALUE = 22\n")
        try:
            return await run(start, source)
        finally:
            source.close()

    assert asyncio.run(main()) == ("new 22\n", 0)


@pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(), reason="this kernel has no groups of sessions"
)
def test_imports_take_little_of_the_processor_from_workers(tmp_path: Path) -> None:
    """The priority of a thread counts within its session only, which is the template's own."""
    text = "import pathlib\nprint(pathlib.Path('/proc/self/autogroup').read_text().split()[1:])\n"
    (tmp_path / "train.py").write_text(text)
    importing = f"import pathlib\nseen = pathlib.Path({str(tmp_path / 'seen')!r})\n"
    importing += "seen.write_text(pathlib.Path('/proc/self/autogroup').read_text())\n"
    (tmp_path / "imported_module.py").write_text(importing)
    own = variables(PYTHONPATH=f"{ROOT}:{tmp_path}")
    start = WorkerStart.of([sys.executable, "train.py"], str(tmp_path), own)

    async def main() -> None:
        source = await ready(start, ["imported_module"])
        assert source._process is not None
        group = Path(f"/proc/{source._process.pid}/autogroup").read_text()
        assert group.split()[1:] == ["nice", "0"], "forks of a low group are late"
        assert await run(start, source) == ("['nice', '0']\n", 0)
        source.close()

    asyncio.run(main())
    assert (tmp_path / "seen").read_text().split()[1:] == ["nice", "10"]


def test_imports_that_take_long_continue_at_normal_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host with far more busy processes than cores would never have a template."""
    written: list[str] = []
    group = SimpleNamespace(write_text=written.append, written=written)
    (tmp_path / "a_long_import.py").write_text(
        "import time\nfrom hvd_elastic.agent.template import process\n"
        "while process._GROUP_PRIORITY.written[-1] != '0': time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "_GROUP_PRIORITY", group)
    monkeypatch.setattr(process, "_LOW_PRIORITY_S", 0.1)
    assert process._import(["a_long_import"]) == ""
    assert written == ["10", "0"]
    del sys.modules["a_long_import"]


def test_imports_may_leave_a_thread_that_is_late_to_end(tmp_path: Path) -> None:
    """On a busy host, a thread that has ended takes seconds to get the core on which it ends."""
    (tmp_path / "train.py").write_text("print('trains')")
    (tmp_path / "ends_late.py").write_text(
        "import threading, time\nuntil = time.monotonic() + 1.5\ndef work():\n"
        "    while time.monotonic() < until: pass\nthreading.Thread(target=work).start()\n"
    )
    own = variables(PYTHONPATH=f"{ROOT}:{tmp_path}")
    start = WorkerStart.of([sys.executable, "train.py"], str(tmp_path), own)

    async def main() -> tuple[str, int]:
        source = await ready(start, ["ends_late"])
        try:
            return await run(start, source)
        finally:
            source.close()

    assert asyncio.run(main()) == ("trains\n", 0)


def test_forks_draw_different_random_numbers(tmp_path: Path) -> None:
    text = "import random, numpy\nprint(random.random(), numpy.random.random())\n"
    (tmp_path / "train.py").write_text(text)
    start = WorkerStart.of([sys.executable, "train.py"], str(tmp_path), variables())

    async def main() -> list[str]:
        source = await ready(start, ["random", "numpy.random"])
        try:
            return [(await run(start, source))[0] for _ in range(2)]
        finally:
            source.close()

    first, second = asyncio.run(main())
    assert not {*first.split()} & {*second.split()}


TENSORFLOW = """
import os, sys
forked = "horovod.tensorflow" in sys.modules
import horovod.tensorflow as hvd, keras, numpy, tensorflow as tf
one = {"RANK": 0, "SIZE": 1, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": 0, "CROSS_SIZE": 1}
os.environ.update({f"HOROVOD_{name}": str(value) for name, value in one.items()})
os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
hvd.init()
inputs = numpy.random.rand(64, 4).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((inputs, inputs.sum(1))).batch(16).prefetch(2)
layers = [keras.layers.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile("adam", "mse")
model.fit(dataset, epochs=2, shuffle=False, verbose=0)
total = tf.function(lambda: tf.reduce_sum(hvd.allreduce(tf.ones(10), name="ones")))()
print(forked, "torch" in sys.modules, model.optimizer.iterations.numpy(), total.numpy())
print(*model.get_weights()[0].ravel())
"""


def test_what_a_script_leaves_open_ends_before_the_modules_that_it_needs(tmp_path: Path) -> None:
    """As a bar of tqdm, which draws itself for the last time when it is deleted."""
    (tmp_path / "bars.py").write_text(
        "import json\nclass Bar:\n    def __del__(self):\n        print('ends with', json)\n"
    )
    (tmp_path / "train.py").write_text("import bars\nbar = bars.Bar()\ndef shown(): return bar\n")
    direct, forked = both_ways([sys.executable, "train.py"], tmp_path)
    assert direct == forked
    assert "ends with <module 'json'" in forked[0]


@needs_tensorflow
def test_forks_train_with_tensorflow_and_draw_different_weights(tmp_path: Path) -> None:
    """TensorFlow starts its threads when the first operation runs, not when it is imported."""
    (tmp_path / "train.py").write_text(TENSORFLOW)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    start = WorkerStart.of([sys.executable, "train.py"], str(tmp_path), variables(**quiet))

    async def main() -> list[tuple[str, int]]:
        source = await ready(start, ["tensorflow", "keras", "horovod.tensorflow"])
        try:
            return [await run(start, source) for _ in range(2)]
        finally:
            source.close()

    first, second = asyncio.run(main())
    assert first[0].startswith("True False 8 10.0\n"), first
    assert second[0].startswith("True False 8 10.0\n"), second
    assert first[0] != second[0]


def refusal(folder: Path, module: str, command: Sequence[str] = ("train.py",)) -> str:
    """What the log of the next worker tells when this is in an imported module."""
    (folder / "imported.py").write_text(module)
    (folder / "train.py").touch()
    further = {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    words = [sys.executable, *command]
    start = WorkerStart.of(words, str(folder), variables(**further))

    async def main() -> str:
        source = await ready(start, ["json", "imported"])
        try:
            text, status = await run(start, source)
            assert status == -1, "it was forked"
            assert (await run(start, source))[0] == "", "it is told once"
            return text
        finally:
            source.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("raise OSError('no device')", "the import of imported failed: OSError: no device"),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("raise SystemExit(3)", "the import of imported failed: SystemExit: 3"),
        ("import os\nprint('it broke', flush=True)\nos._exit(3)", "it broke"),
        (
            "from threading import *\nThread(target=Event().wait, daemon=True).start()",
            "the imports start threads (python",
        ),
    ],
)
def test_imports_that_cannot_live_with_a_fork_are_told(
    tmp_path: Path, module: str, told: str
) -> None:
    assert told in refusal(tmp_path, module)


@needs_tensorflow
@COSTLY
def test_imports_that_run_tensorflow_are_told(tmp_path: Path) -> None:
    module = "import tensorflow\ntensorflow.constant(1)\n"
    assert "the imports start threads (" in refusal(tmp_path, module)


def test_imports_that_use_a_gpu_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_GPU_DEVICES", (os.devnull,))
    with open(os.devnull):  # noqa: PTH123
        assert process._trouble() == f"the imports use the GPU ({os.devnull})"


def test_a_fork_for_which_there_is_no_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, "fork", fail)
    told = tmp_path / "told"
    with told.open("wb") as file:
        assert process._fork((0, file.fileno()))
    assert "no memory" in told.read_text()


def test_a_template_that_was_killed_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    start = WorkerStart.of([sys.executable, "train.py"], str(tmp_path), variables())

    async def main() -> str:
        source = await ready(start, [])
        assert source._process is not None
        os.kill(source._process.pid, signal.SIGKILL)
        text, _ = await run(start, source)
        source.close()
        return text

    assert "it could not be forked" in asyncio.run(main())


def test_after_a_fork_that_is_late_there_is_another_template(tmp_path: Path) -> None:
    """It is late after half of the time after which the silent host would be lost."""
    (tmp_path / "train.py").write_text("print('trains')")
    start = WorkerStart.of([sys.executable, "train.py"], str(tmp_path), variables())

    async def main() -> None:
        source = await ready(start, [])
        assert source._process is not None
        late = source._process.pid
        os.kill(late, signal.SIGSTOP)
        with (tmp_path / "told").open("wb") as output:
            assert source.fork(start, output.fileno(), 2.0) is None
        os.kill(late, signal.SIGCONT)
        told = (tmp_path / "told").read_text()
        assert "this worker is started without a template: no fork within 1 s; the next" in told
        source.warm()
        while source._process is not None and not source._process.is_ready:
            await asyncio.sleep(0.01)
        assert await run(start, source) == ("trains\n", 0)
        source.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (["/usr/bin/python3.12", "-u", "train.py", "-u"], ("train.py", "-u")),
        (["python", "-Xdev", "-X", "utf8", "-W", "error", "-OO", "a/b.py"], ("a/b.py",)),
        (["python3", "-Bs", "-m", "train.cli", "--x"], ("-m", "train.cli", "--x")),
    ],
)
def test_commands_that_can_be_forked(command: list[str], program: tuple[str, ...]) -> None:
    parsed = parse_python_command(command, {})
    assert parsed.program == program
    assert [*parsed.interpreter, *program] == command


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["bash", "-c", "python train.py"], "bash is not Python"),
        (["./train.py"], "./train.py is not Python"),
        (["/opt/bin/mypython", "train.py"], "mypython is not Python"),
        (["python", "-c", "pass"], "-c is not a script"),
        (["python", "-i", "train.py"], "-i is not a script"),
        (["python", "-"], "- is not a script"),
        (["python", "train.zip"], "train.zip is not a script"),
        (["python", "-m"], "-m is not a script"),
        (["python", "-X"], "nothing is not a script"),
        (["python"], "nothing is not a script"),
    ],
)
def test_commands_that_cannot_be_forked(command: list[str], told: str) -> None:
    with pytest.raises(UnsuitableError) as refused:
        parse_python_command(command, {})
    assert told in str(refused.value)


def test_an_interpreter_that_stays_after_the_script_cannot_be_forked() -> None:
    with pytest.raises(UnsuitableError, match="PYTHONINSPECT"):
        parse_python_command(["python", "train.py"], {"PYTHONINSPECT": "1"})
