"""What an installation promises: quick imports, arrows that hold, entry points that exist."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.paths import LIMIT_S, OF_ONE_FRAMEWORK

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "tensorflow", "horovod", "fabric", "paramiko", "ray", "pyspark", "mpi4py")
PROMISED_S = 0.6
"""Twice what `benchmarks/startup.py` measures as promised: tests run on busy machines."""

INTERRUPT = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"

PURE = [
    "hvd_elastic",
    "hvd_elastic.errors",
    "hvd_elastic.config",
    *(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for folder in (
            "model",
            "policy",
            "control",
            "sim",
            "wire",
            "records",
            "checkpoint",
            "communicator",
            "worker",
            "input",
            "script",
        )
        for path in sorted((ROOT / "hvd_elastic" / folder).rglob("*.py"))
        if path.name != "loop.py"
    ),
]


def fresh(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd="/",
        timeout=LIMIT_S,
    )


def test_pure_packages_import_with_the_heavy_ones_blocked():
    program = """
import importlib, sys
heavy, modules = sys.argv[1].split(","), sys.argv[2].split(",")
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            raise ImportError(f"{name} is imported by a pure module")
sys.meta_path.insert(0, Block())
for module in modules:
    importlib.import_module(module)
"""
    done = fresh(program, ",".join(HEAVY), ",".join(PURE))
    assert done.returncode == 0, done.stderr


def test_a_checkout_in_the_working_folder_does_not_hide_the_package(tmp_path: Path) -> None:
    """``git clone … hvd_elastic`` in the home folder, where agents and the user's scripts start."""
    (tmp_path / "hvd_elastic/hvd_elastic").mkdir(parents=True)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", "import hvd_elastic.errors; print(hvd_elastic.__version__)"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr


def test_the_cluster_tools_work_without_torch_and_horovod(tmp_path):
    program = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "tensorflow", "horovod"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Block())
import hvd_elastic.cli.cluster.tools
from hvd_elastic.tools.run.commands import run_on_hosts
from hvd_elastic.tools.copy.copying import copy_to_hosts
from hvd_elastic.tools.check.health import CheckSettings, check_cluster
from hvd_elastic.hosts.hostfile import parse_hosts
from hvd_elastic.cluster.kill import Target, kill_run  # its name for users
from hvd_elastic.tools.kill import Target as SameTarget
assert Target is SameTarget, "a second copy of the module"
from hvd_elastic.hosts.ssh import SshOptions
hosts = parse_hosts("localhost", "text").hosts
source, there = sys.argv[1:]
(ran,) = run_on_hosts(hosts, "echo it works")
(copied,) = copy_to_hosts(hosts, source, there, SshOptions())
(killed,) = kill_run(hosts, Target(run="no-such-run"), dry_run=True)
(checked,) = check_cluster(hosts, settings=CheckSettings(network=False)).hosts
names = [check.name for check in checked.answer.checks]
print(ran.answer.text, copied.answer.files, killed.answer.processes, "python" in names, sep="|")
"""
    (tmp_path / "file").write_bytes(b"data")
    done = fresh(program, str(tmp_path / "file"), str(tmp_path / "copy"))
    assert done.stdout == "it works|1|()|True\n", done.stderr
    assert (tmp_path / "copy").read_bytes() == b"data"


def test_pytorchs_frontend_imports_no_tensorflow():
    """``tests/unit/tensorflow/test_state.py`` has the other way round."""
    pytest.importorskip("torch")
    done = fresh(
        "import sys, hvd_elastic.torch, horovod.torch, hvd_elastic.records.tensorboard as t\n"
        "t.check_tensorboard('a test')\n"
        "print({'tensorflow', 'keras'} & sys.modules.keys())"
    )
    assert done.stdout == "set()\n", done.stderr


SUBMIT = """
import hvd_elastic.cli.app, hvd_elastic.jobs.server
from hvd_elastic.jobs.job import Answer
from hvd_elastic.jobs.place import ClusterFolder
ClusterFolder.create("test")
hvd_elastic.jobs.server.ask_daemon = lambda *_: Answer("submitted", jobs=[1], data=["true-1"])
try: hvd_elastic.cli.app.main(["submit", "--plain", "--", "true"])
except SystemExit as end: assert end.code == 0
"""
"""Submits to a daemon that has answered; what the answer waits for delays the start of the job."""


@pytest.mark.parametrize(
    "program",
    [
        "import hvd_elastic",
        "import hvd_elastic.cli.app as a\ntry: a.main(['--help'])\nexcept SystemExit: pass",
        SUBMIT,
    ],
    ids=["import", "help", "submit"],
)
def test_import_help_and_submit_load_nothing_heavy(program, tmp_path, monkeypatch):
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    show = "import sys; print(','.join(sys.modules), file=sys.stderr)"
    done = fresh(f"{program}\n{show}")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.strip().splitlines()[-1].split(","))
    assert not loaded & {*HEAVY, "numpy", "scipy"}


@pytest.mark.parametrize(
    "arguments",
    [["-c", "import hvd_elastic"], ["-m", "hvd_elastic.cli.app", "--help"]],
    ids=["import", "help"],
)
def test_import_and_help_are_quick(arguments):
    # The processor time of the child, the best of several: it is what we cause, whatever else the
    # machine is doing.
    program = """
import resource, subprocess, sys
best = 1e9
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
print(best)
"""
    done = fresh(program, *arguments)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < PROMISED_S


def project() -> str:
    """What pyproject.toml says of the package, without what it says to tools."""
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.")[0]


def console_scripts() -> dict[str, str]:
    return dict(re.findall(r'^([a-z-]+) = "([\w.]+:\w+)"$', project(), re.MULTILINE))


@pytest.mark.parametrize(("program", "target"), sorted(console_scripts().items()))
def test_each_program_has_its_function_and_runs_from_the_checkout(program, target):
    wrapper = ROOT / "scripts" / program
    assert os.access(wrapper, os.X_OK)
    assert f"{program} {target} " in wrapper.read_text(encoding="utf-8")
    module, function = target.split(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("program", sorted(console_scripts()))
def test_an_interrupt_while_a_program_is_imported_ends_it_quietly(program, tmp_path):
    (tmp_path / "typer.py").write_text(INTERRUPT)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    wrapper = str(ROOT / "scripts" / program)
    done = subprocess.run(
        [wrapper, "--help"],
        capture_output=True,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_an_interrupt_while_a_command_is_imported_is_not_lost(tmp_path):
    # What is raised in a callback, as those of the import system, goes nowhere.
    body = textwrap.indent(INTERRUPT, " " * 8)
    (tmp_path / "late.py").write_text(f"class It:\n    def __del__(self):\n{body}\nIt()\n")
    program = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import hvd_elastic.cli
hvd_elastic.cli.__path__.insert(0, sys.argv[1])
from hvd_elastic.cli.app import COMMANDS, main
COMMANDS["late"] = ("late:late", "Late.")
main(["late"])
"""
    done = fresh(program, str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_all_programs_are_declared():
    assert set(console_scripts()) == {
        "hvd-elastic", "runclust", "copyclust", "killclust", "checkclust", "virtclust"
    }  # fmt: skip


def test_no_list_of_dependencies_names_horovod():
    # Its source release does not build unpatched: pip would stop at it.
    assert '"torch>=' in project()
    assert '"horovod' not in project()


def test_every_folder_with_modules_is_a_package():
    # find_packages leaves out a folder without __init__.py, silently
    folders = {path.parent for path in (ROOT / "hvd_elastic").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def make(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(
        ["make", "-C", str(ROOT), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**environment, "MFLAGS": ""},
    )


def test_make_alone_lists_the_targets_from_any_folder(tmp_path):
    done = make(folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for target in ("demo", "test", "lint", "bench", "horovod", "clean", "help"):
        assert re.search(rf"^  {target} +\w", done.stdout, re.MULTILINE), target


def test_ci_runs_the_test_commands_of_the_readme_and_nothing_else():
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert lines[-3:] == ["make test", "make test-engines", "exec make test-trainers"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_no_folder_of_tests_is_passed_over(pytestconfig):
    """pytest passes over some folder names by itself, ``dist`` among them."""
    passed_over = pytestconfig.getini("norecursedirs")
    for folder in sorted((ROOT / "tests").iterdir()):
        if folder.is_dir() and not folder.name.startswith("__"):
            assert not any(folder.match(pattern) for pattern in passed_over), folder


@pytest.mark.parametrize(("framework", "folders"), OF_ONE_FRAMEWORK.items())
def test_the_doctests_of_all_that_imports_a_framework_are_left_out_without_it(framework, folders):
    module = {
        "torch": "torch",
        "tensorflow": "(tensorflow|keras)",
        "lightning": r"hvd_elastic\.lightning\.library",
        "transformers": "(transformers|accelerate)",
    }[framework]
    imports = re.compile(rf"^(import|from) (horovod\.)?{module}\b", re.MULTILINE)
    found = [
        path.relative_to(ROOT)
        for path in (ROOT / "hvd_elastic").rglob("*.py")
        if imports.search(path.read_text(encoding="utf-8"))
    ]
    assert found
    assert [path for path in found if not any(path.is_relative_to(part) for part in folders)] == []


def test_only_the_tests_of_engines_and_trainers_are_left_out():
    """pytest's summary and the README say what a run of all tests leaves out."""
    settings = (ROOT / "pyproject.toml").read_text("utf-8")
    folders = {path.relative_to(ROOT).parts[1] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    left_out = {name for name in folders if f'"tests/{name}"' not in settings}
    assert left_out <= {"engines", "trainers"}
