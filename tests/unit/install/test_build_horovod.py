"""The Horovod builder: what it decides, patches and keeps. Nothing is compiled here."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import threading
from pathlib import Path

import pytest

from hvd_elastic import frameworks
from hvd_elastic.cli import app
from hvd_elastic.errors import BuildError
from hvd_elastic.install import build_horovod, horovod_wheel, prerequisites
from hvd_elastic.install.horovod_wheel import BuildInputs
from hvd_elastic.install.prerequisites import PREREQUISITES
from hvd_elastic.programs import nvidia
from tests.paths import LIMIT_S

INPUTS = BuildInputs(
    horovod="0.28.1",
    python="cp311",
    platform="x86_64-glibc2.36",
    torch="2.13.0+cpu",
    tensorflow=None,
    mpi="4.1.4",
    cuda=None,
    nccl=None,
    patch="0123456789ab",
)


def variables(inputs: BuildInputs, base: dict[str, str] | None = None) -> dict[str, str]:
    return build_horovod.build_environment(inputs, base or {"PATH": "/usr/bin"}, jobs=3)


# --- what a wheel depends on ----------------------------------------------------------------------


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(BuildInputs)])
def test_every_input_changes_the_name(field):
    assert dataclasses.replace(INPUTS, **{field: "9.9"}).name != INPUTS.name


def test_the_name_is_one_plain_folder_name():
    odd = dataclasses.replace(INPUTS, torch="2.13.0+cu130 (a/b)")
    assert "/" not in odd.name
    assert " " not in odd.name


def test_inputs_of_this_machine_import_nothing_heavy():
    program = (
        "import sys; from hvd_elastic.install import build_horovod as b; from hvd_elastic.install."
        "horovod_wheel import detect_inputs; print(detect_inputs(b.patch_digest()).name);"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert build_horovod.patch_digest()[:12] in done.stdout


def fake_program(folder: Path, name: str, body: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    program.chmod(0o755)


def test_mpi_counts_only_with_open_mpi_s_headers(tmp_path, monkeypatch):
    (tmp_path / "include").mkdir()
    fake_program(
        tmp_path,
        "mpicxx",
        f'case "$1" in *version) echo "mpicxx: Open MPI 4.1.4 (Language: C++)";; '
        f"*) echo {tmp_path}/include;; esac",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert horovod_wheel.detect_inputs("x").mpi is None
    (tmp_path / "include" / "mpi.h").touch()
    assert horovod_wheel.detect_inputs("x").mpi == "4.1.4"
    assert horovod_wheel.detect_inputs("x", with_mpi=False).mpi is None


NCCL_HEADER = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 3\n"


def test_cuda_counts_with_a_torch_that_was_compiled_for_it(tmp_path, monkeypatch):
    built_for: str | None = "13.0"
    facts = lambda: {"__version__": "2", "cuda": built_for}  # noqa: E731
    monkeypatch.setattr(horovod_wheel, "_torch_facts", facts)
    monkeypatch.setattr(horovod_wheel, "has_gpu", lambda: True)
    monkeypatch.setenv("HOROVOD_NCCL_INCLUDE", str(tmp_path))
    (tmp_path / "nccl.h").write_text(NCCL_HEADER)
    found = horovod_wheel.detect_inputs("x")
    assert (found.cuda, found.nccl) == ("13.0", "2.27.3")
    found = horovod_wheel.detect_inputs("x", with_nccl=False)
    assert (found.cuda, found.nccl) == (None, None)
    built_for = None
    found = horovod_wheel.detect_inputs("x")
    assert (found.cuda, found.nccl) == (None, None)


def test_without_a_gpu_horovod_is_for_cpus_whatever_torch_is_for(monkeypatch, tmp_path, capsys):
    """Unless it is asked for, or such a build is there: hosts with GPUs may share the folder."""
    fake_program(tmp_path, "nvidia-smi", "echo 'No devices were found'; exit 6")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    torch = {"__version__": "2.13.0+cu130", "cuda": "13.0"}
    monkeypatch.setattr(horovod_wheel, "_torch_facts", lambda: torch)
    monkeypatch.setattr(horovod_wheel, "installed_build", lambda: None)  # it may be this one here
    assert horovod_wheel.detect_inputs("x").cuda is None
    assert command("--print-name") == 0
    with_cuda = horovod_wheel.detect_inputs("x", with_nccl=True)
    assert with_cuda.cuda == "13.0"
    monkeypatch.setattr(build_horovod, "provide_horovod", lambda *_, **__: None)
    assert command() == 0
    assert "No GPU here, so Horovod is built for CPUs; for CUDA 13.0" in capsys.readouterr().out
    monkeypatch.setattr(horovod_wheel, "installed_build", lambda: with_cuda.name)
    assert horovod_wheel.detect_inputs("x") == with_cuda
    assert horovod_wheel.detect_inputs("x", with_nccl=False).cuda is None
    fake_program(tmp_path, "nvidia-smi", "echo NVIDIA H100")
    monkeypatch.setattr(horovod_wheel, "installed_build", lambda: None)
    assert horovod_wheel.detect_inputs("x") == with_cuda


def test_what_is_installed_does_not_need_an_answer_of_nvidia_smi(monkeypatch, tmp_path, capsys):
    fake_program(tmp_path, "nvidia-smi", "exec sleep 60")
    monkeypatch.setattr(nvidia, "LIMIT_S", 0.1)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    torch = {"__version__": "2.13.0+cu130", "cuda": "13.0"}
    monkeypatch.setattr(horovod_wheel, "_torch_facts", lambda: torch)
    for with_nccl in (True, False):
        chosen = horovod_wheel.detect_inputs("x", with_nccl=with_nccl)
        monkeypatch.setattr(horovod_wheel, "installed_build", lambda name=chosen.name: name)
        assert horovod_wheel.detect_inputs("x") == chosen
    monkeypatch.setattr(build_horovod, "patch_digest", lambda: "x")
    monkeypatch.setattr(build_horovod, "provide_horovod", lambda *_, **__: None)
    assert command() == 0
    assert "No GPU here" not in capsys.readouterr().out, "nobody has said that"
    monkeypatch.setattr(horovod_wheel, "installed_build", lambda: "another")
    with pytest.raises(BuildError, match="make horovod ARGS=--without-nccl"):
        horovod_wheel.detect_inputs("x")


@pytest.mark.parametrize(
    ("version", "cuda", "built", "told"),
    [
        ("2.21.0", None, "2.21.0", None),
        ("2.15.1", None, None, "left out: TensorFlow 2.15.1 is installed"),
        ("2.21.0", "13.0", None, "--without-nccl"),
        (None, "13.0", None, None),
    ],
)
def test_a_tensorflow_that_horovod_cannot_serve_is_left_out_with_the_reason(
    monkeypatch, version, cuda, built, told
):
    monkeypatch.setattr(horovod_wheel, "_torch_facts", lambda: {"__version__": "2", "cuda": cuda})
    monkeypatch.setattr(horovod_wheel, "has_gpu", lambda: True)
    monkeypatch.setattr(horovod_wheel, "tensorflow_version", lambda: version)
    monkeypatch.setattr(horovod_wheel, "version_of", lambda _: "3.15.1")
    assert horovod_wheel.detect_inputs("x").tensorflow == built
    assert horovod_wheel.detect_inputs("x", with_tensorflow=False).tensorflow is None
    why = horovod_wheel.why_left_out(cuda)
    assert why is None if told is None else told in str(why)


def test_a_toolkit_that_pip_cannot_bring_must_be_there(tmp_path, monkeypatch):
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(horovod_wheel, "find_program", lambda *_: None)
    monkeypatch.setattr(horovod_wheel, "_USUAL_HOME", tmp_path / "none")
    for_cuda_12 = dataclasses.replace(INPUTS, cuda="12.8", nccl="2.27.3")
    with pytest.raises(BuildError, match=r"no nvcc.*cuda-nvcc-12-8.*--without-nccl"):
        build_horovod.check_machine(for_cuda_12, tmp_path)
    monkeypatch.setattr(build_horovod, "missing", lambda _: [])
    build_horovod.check_machine(dataclasses.replace(for_cuda_12, cuda="13.0"), tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    build_horovod.check_machine(for_cuda_12, tmp_path)
    with pytest.raises(BuildError, match=r"no nccl\.h.*libnccl-dev.*--without-nccl"):
        build_horovod.check_machine(dataclasses.replace(for_cuda_12, nccl=None), tmp_path)


def packages_of_nvidia(site: Path, monkeypatch) -> Path:
    """What pip puts beside a PyTorch for CUDA 13, in a folder that Python imports from."""
    for name in ("nccl/include/nccl.h", "nccl/lib/libnccl.so.2", "cu13/include/cublas_v2.h"):
        (site / "nvidia" / name).parent.mkdir(parents=True, exist_ok=True)
        (site / "nvidia" / name).write_text(NCCL_HEADER)
    monkeypatch.syspath_prepend(str(site))
    return site / "nvidia"


def test_pytorch_s_own_nccl_is_linked(tmp_path, monkeypatch):
    nvidia = packages_of_nvidia(tmp_path / "site", monkeypatch)
    monkeypatch.delenv("HOROVOD_NCCL_INCLUDE", raising=False)
    monkeypatch.delenv("HOROVOD_NCCL_HOME", raising=False)
    found = build_horovod.nccl_variables(tmp_path)
    assert found["HOROVOD_NCCL_INCLUDE"] == str(nvidia / "nccl/include")
    assert found["HOROVOD_NCCL_LINK"] == "SHARED"
    library = Path(found["HOROVOD_NCCL_LIB"]) / "libnccl.so"
    assert library.resolve() == nvidia / "nccl/lib/libnccl.so.2"
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(nvidia / "nccl" / "include" / ".."))
    assert build_horovod.nccl_variables(tmp_path).keys() == {"HOROVOD_NCCL_INCLUDE"}


def test_packages_become_a_toolkit(tmp_path, monkeypatch):
    nvidia = packages_of_nvidia(tmp_path / "site", monkeypatch)
    for name in ("bin/nvcc", "include/cuda_runtime.h", "lib/libcudart.so.13"):
        (tmp_path / "new/nvidia/cu13" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "new/nvidia/cu13" / name).touch()
    home = horovod_wheel.assemble_toolkit(tmp_path / "new", "13.0")
    assert (home / "bin" / "nvcc").is_file()
    assert (home / "lib64" / "libcudart.so").is_file()
    assert (home / "include" / "cuda_runtime.h").is_file()
    assert (home / "include" / "cublas_v2.h").resolve() == nvidia / "cu13/include/cublas_v2.h"


# --- the environment of the build -----------------------------------------------------------------


def test_the_build_finds_what_the_check_before_it_has_found():
    """The PATH of a user who is not root often lacks folders of the system."""
    folders = variables(INPUTS, {"PATH": "/opt/own"})["PATH"].split(":")
    assert folders[:2] == [str(Path(sys.executable).parent), "/opt/own"]
    assert {"/usr/bin", "/usr/local/bin", "/usr/sbin"} < set(folders)


def test_what_is_there_is_demanded_and_what_is_not_is_switched_off():
    found = variables(INPUTS)
    assert found["HOROVOD_WITH_PYTORCH"] == found["HOROVOD_WITH_GLOO"] == "1"
    assert found["HOROVOD_WITH_MPI"] == found["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert found["HOROVOD_WITHOUT_MXNET"] == "1"
    assert "HOROVOD_WITHOUT_MPI" not in found
    assert "HOROVOD_GPU_OPERATIONS" not in found
    other = variables(dataclasses.replace(INPUTS, mpi=None, tensorflow="2.21.0"))
    assert other["HOROVOD_WITHOUT_MPI"] == other["HOROVOD_WITH_TENSORFLOW"] == "1"
    assert "HOROVOD_WITH_MPI" not in other
    alone = variables(dataclasses.replace(INPUTS, torch=None, tensorflow="2.21.0"))
    assert alone["HOROVOD_WITHOUT_PYTORCH"] == alone["HOROVOD_WITH_TENSORFLOW"] == "1"
    assert "HOROVOD_WITH_PYTORCH" not in alone


def test_the_outer_make_and_the_user_s_switches_do_not_reach_the_build():
    base = {
        "PATH": "/usr/bin",
        "MAKEFLAGS": "w -j --jobserver-auth=3,4",
        "MAKELEVEL": "1",
        "HOROVOD_WITHOUT_GLOO": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "CMAKE_GENERATOR": "Ninja",
        "CXX": "g++-12",
    }
    found = variables(INPUTS, base)
    assert found["MAKEFLAGS"] == "-j3"
    assert found["CXX"] == "g++-12"
    assert not {"MAKELEVEL", "HOROVOD_WITHOUT_GLOO", "HOROVOD_WITHOUT_PYTORCH"} & found.keys()
    assert "CMAKE_GENERATOR" not in found


def test_nccl_is_asked_for_where_it_is_unless_the_user_says_otherwise(tmp_path):
    inputs = dataclasses.replace(INPUTS, cuda="13.0", nccl="2.27.3")
    ours = {"HOROVOD_NCCL_INCLUDE": "/ours", "HOROVOD_NCCL_LINK": "SHARED"}
    found = build_horovod.build_environment(
        inputs, {"HOROVOD_NCCL_LINK": "STATIC"}, jobs=1, cuda_home=tmp_path, nccl=ours
    )
    assert found["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert found["HOROVOD_CUDA_HOME"] == str(tmp_path)
    assert found["HOROVOD_NCCL_INCLUDE"] == "/ours"
    assert found["HOROVOD_NCCL_LINK"] == "STATIC"


@pytest.mark.parametrize(("cores", "gigabytes", "jobs"), [(2, 16, 2), (64, 8, 3), (4, 0.5, 1)])
def test_compilers_fit_cores_and_memory(cores, gigabytes, jobs):
    assert build_horovod.parallel_jobs(cores, int(gigabytes * 1e9)) == jobs


# --- the patch ------------------------------------------------------------------------------------


def source_before_the_patch(folder: Path) -> Path:
    """Files that hold what the patch expects, where it expects it, and blank lines elsewhere."""
    files: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in build_horovod.PATCH.read_text(encoding="utf-8").splitlines():
        if line.startswith("--- a/"):
            lines = files.setdefault(line.removeprefix("--- a/"), [])
        elif hunk := re.match(r"@@ -(\d+)", line):
            lines += [""] * (int(hunk[1]) - 1 - len(lines))
        elif not line.startswith("+"):
            lines.append(line[1:])
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(content) + "\n", encoding="utf-8")
    return folder


def test_the_patch_raises_the_standard_and_lets_a_failed_process_initialise_again(tmp_path):
    source = source_before_the_patch(tmp_path)
    build_horovod.prepare_source(source, INPUTS)
    assert "set(CMAKE_CXX_STANDARD 17)" in (source / "CMakeLists.txt").read_text()
    assert "set(CMAKE_CXX_STANDARD 17)" in (source / "horovod/torch/CMakeLists.txt").read_text()
    operations = (source / "horovod/common/operations.cc").read_text()
    assert "initialization_failed = false;" in operations
    assert "410" in (source / "horovod/common/gloo/http_store.cc").read_text()


@pytest.mark.parametrize(("tensorflow", "kept"), [(None, True), ("2.21.0", False)])
def test_a_build_for_tensorflow_has_no_xla_ops(tmp_path, tensorflow, kept):
    source = source_before_the_patch(tmp_path)
    cmake = source / "horovod" / "tensorflow" / "CMakeLists.txt"
    cmake.parent.mkdir(parents=True)
    cmake.write_text("# before\n" + build_horovod._XLA_SOURCE + "# after\n")
    build_horovod.prepare_source(source, dataclasses.replace(INPUTS, tensorflow=tensorflow))
    assert ("xla_mpi_ops.cc" in cmake.read_text()) is kept
    assert "# before\n" in cmake.read_text()


def test_a_source_without_the_line_to_drop_is_refused(tmp_path):
    source = source_before_the_patch(tmp_path)
    cmake = source / "horovod" / "tensorflow" / "CMakeLists.txt"
    cmake.parent.mkdir(parents=True)
    cmake.write_text("# another release\n")
    with pytest.raises(BuildError, match=r"xla_mpi_ops\.cc"):
        build_horovod.prepare_source(source, dataclasses.replace(INPUTS, tensorflow="2.21.0"))


def test_a_hunk_that_does_not_fit_stops_before_any_file_is_written(tmp_path):
    source = source_before_the_patch(tmp_path)
    last = source / "horovod" / "torch" / "CMakeLists.txt"
    last.write_text(last.read_text().replace("STANDARD 14", "STANDARD 20"))
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    with pytest.raises(BuildError, match=r"not the release(.|\n)*torch/CMakeLists\.txt:64"):
        build_horovod.prepare_source(source, INPUTS)
    assert before == {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}


def test_a_missing_file_is_named(tmp_path):
    source = source_before_the_patch(tmp_path)
    (source / "CMakeLists.txt").unlink()
    with pytest.raises(BuildError, match=r"CMakeLists\.txt"):
        build_horovod.prepare_source(source, INPUTS)


def test_the_patch_applies_inside_somebody_s_repository(tmp_path):
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    source = source_before_the_patch(tmp_path / "source")
    build_horovod.prepare_source(source, INPUTS)
    assert "set(CMAKE_CXX_STANDARD 17)" in (source / "CMakeLists.txt").read_text()


# --- the source release ---------------------------------------------------------------------------


def archive_with(setup: str, folder: Path) -> Path:
    """A source release as a package index could give it."""
    archive = folder / "horovod-0.28.1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        info = tarfile.TarInfo("horovod-0.28.1/setup.py")
        info.size = len(setup)
        tar.addfile(info, io.BytesIO(setup.encode()))
    return archive


def test_an_archive_that_is_not_the_release_is_not_run(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    archive_with(f"open({str(ran)!r}, 'w')", tmp_path)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(build_horovod, "BUILD_REQUIREMENTS", ())
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "work").mkdir()
    with pytest.raises(BuildError, match=r"DO NOT MATCH THE HASHES(.|\n)*Expected sha256 92a43f5"):
        build_horovod.build_wheel(INPUTS, tmp_path / "work", tmp_path / "log", 1)
    assert not ran.exists()


def test_the_release_is_unpacked(tmp_path):
    archive = archive_with("", tmp_path)
    assert (build_horovod.unpack_sdist(archive, tmp_path) / "setup.py").is_file()


def test_all_that_pip_installs_for_a_build_is_pinned_with_digests(tmp_path):
    names = [*prerequisites.BUILD_REQUIREMENTS, *prerequisites.RUN_REQUIREMENTS]
    names += ["horovod", "pip", *horovod_wheel.toolkit_packages(horovod_wheel.PIP_CUDA)]
    *_, file = prerequisites.pip_arguments(names, tmp_path)
    text = Path(file).read_text()
    for name in names:
        assert re.search(rf"^{name}==[\d.]+.*\\\n    --hash=sha256:", text, re.MULTILINE), name
    assert prerequisites.pinned_version("horovod") == horovod_wheel.HOROVOD_VERSION


# --- other programs -------------------------------------------------------------------------------


def answer(status: int, out: str = "", err: str = ""):
    def run(*_, **__):
        return subprocess.CompletedProcess([], status, out, err)

    return run


def test_a_horovod_that_crashes_on_import_is_reported():
    built, why = horovod_wheel.ask_horovod("torch", run=answer(1, err="Trace\nno libmpi.so\n\n"))
    assert (built, why) == (None, "Trace\nno libmpi.so")
    assert horovod_wheel.ask_horovod("torch", run=answer(-11)) == (None, "status -11")


def test_a_horovod_that_hangs_is_reported():
    def run(*_, **__):
        raise subprocess.TimeoutExpired("python", 1)

    built, why = horovod_wheel.ask_horovod("torch", 1.0, run)
    assert built is None
    assert "no answer" in why


def test_what_horovod_prints_before_its_answer_is_ignored():
    built, _ = horovod_wheel.ask_horovod("torch", run=answer(0, 'a banner\n{"gloo": true}\n'))
    assert built == {"gloo": True}


def test_no_code_of_the_working_folder_is_run(tmp_path, monkeypatch):
    """Which may be /tmp, where anybody may have put it."""
    for name in ("json.py", "importlib.py", "horovod.py", "pip.py", "runpy.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'a')")
    monkeypatch.chdir(tmp_path)
    horovod_wheel.ask_horovod("none")
    done = subprocess.run([*build_horovod._PIP, "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("pip ")
    assert not (tmp_path / "ran").exists()


# --- what is checked before anything is compiled --------------------------------------------------


def test_without_a_framework_the_ways_to_one_are_named(tmp_path, monkeypatch):
    with pytest.raises(BuildError, match=r"install 'torch>=(.|\n)*install 'tensorflow-cpu>="):
        build_horovod.check_machine(dataclasses.replace(INPUTS, torch=None), tmp_path)
    monkeypatch.setattr(build_horovod, "missing", lambda _: [])
    alone = dataclasses.replace(INPUTS, torch=None, tensorflow="2.21.0")
    build_horovod.check_machine(alone, tmp_path)


def test_an_environment_without_pip_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BuildError, match=r"has no pip.* -m ensurepip .*uv venv --seed"):
        build_horovod.provide_horovod(INPUTS, rebuild=True)


def test_a_missing_compiler_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    lacking = [item for item in PREREQUISITES if item.name in ("g++", "cmake")]
    monkeypatch.setattr(build_horovod, "missing", lambda _: lacking)
    monkeypatch.setattr(build_horovod, "has_apt", lambda: True)
    with pytest.raises(BuildError, match=r"g\+\+, cmake; run: sudo apt-get install -y g\+\+ cmake"):
        build_horovod.check_machine(INPUTS, tmp_path)


def test_a_full_disk_is_named_with_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(build_horovod, "missing", lambda _: [])
    monkeypatch.setattr(prerequisites, "BUILD_SPACE_BYTES", 10**18)
    with pytest.raises(BuildError, match="TMPDIR"):
        build_horovod.check_machine(INPUTS, tmp_path)


# --- the cache ------------------------------------------------------------------------------------


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """A cache of its own, and fakes for compiling and installing that keep a diary."""
    diary: list[str] = []
    lock = threading.Lock()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def build_wheel(inputs, work, log, jobs):
        with lock:
            diary.append("build")
        wheel = Path(work) / "horovod-0.28.1-cp311.whl"
        wheel.write_text("wheel")
        return wheel

    def install_wheel(wheel, inputs, log):
        if wheel.read_text() != "wheel":
            raise BuildError("damaged")
        with lock:
            diary.append("install")
        return {}

    monkeypatch.setattr(build_horovod, "build_wheel", build_wheel)
    monkeypatch.setattr(build_horovod, "install_wheel", install_wheel)
    monkeypatch.setattr(build_horovod, "installed_build", lambda: None)
    monkeypatch.setattr(build_horovod, "check_machine", lambda *_: None)
    return diary


def test_the_second_environment_takes_the_kept_wheel(workshop):
    build_horovod.provide_horovod(INPUTS)
    build_horovod.provide_horovod(INPUTS)
    assert workshop == ["build", "install", "install"]
    kept = horovod_wheel.cached_wheel(INPUTS)
    assert kept is not None
    assert kept.parent.name == INPUTS.name
    assert (kept.parent / "build.json").is_file()


def test_a_wheel_for_both_frameworks_serves_an_environment_with_one(workshop):
    both = dataclasses.replace(INPUTS, tensorflow="2.21.0")
    build_horovod.provide_horovod(both)
    build_horovod.provide_horovod(INPUTS)
    build_horovod.provide_horovod(dataclasses.replace(INPUTS, tensorflow="2.22.0"))
    assert workshop == ["build", "install", "install", "build", "install"]


def make_writable(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda kept: kept.write_text("another"), "another SHA-256"),
        (make_writable, "others can write"),
        (lambda kept: make_writable(kept.parent), "others can write"),
        (lambda kept: make_writable(kept.parent.parent), "others can write"),
        pytest.param(
            lambda kept: os.chown(kept, 65534, -1),
            "belongs to user id 65534",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
        ),
    ],
)
def test_a_kept_wheel_that_others_may_have_changed_is_not_installed(workshop, capsys, change, why):
    build_horovod.provide_horovod(INPUTS)
    kept = horovod_wheel.cached_wheel(INPUTS)
    assert kept is not None
    change(kept)
    build_horovod.provide_horovod(INPUTS)
    assert workshop == ["build", "install"] * 2
    assert why in capsys.readouterr().out
    build_horovod.provide_horovod(INPUTS)  # what was built then is fit to be used
    assert workshop == ["build", "install"] * 2 + ["install"]


def test_a_kept_wheel_is_not_writable_for_others_whatever_the_umask(workshop):
    before = os.umask(0)
    try:
        build_horovod.provide_horovod(INPUTS)
    finally:
        os.umask(before)
    build_horovod.provide_horovod(INPUTS)
    assert workshop == ["build", "install", "install"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("torch", "2.12.0"), ("python", "cp310"), ("platform", "x86_64-glibc2.41"), ("mpi", None)],
)
def test_a_wheel_for_something_else_is_not_taken(workshop, name, value):
    build_horovod.provide_horovod(INPUTS)
    build_horovod.provide_horovod(dataclasses.replace(INPUTS, **{name: value}))
    assert workshop.count("build") == 2


def test_what_is_installed_already_is_left_alone(workshop, monkeypatch):
    monkeypatch.setattr(build_horovod, "installed_build", lambda: INPUTS.name)
    build_horovod.provide_horovod(INPUTS)
    assert workshop == []
    build_horovod.provide_horovod(INPUTS, rebuild=True)
    assert workshop == ["build", "install"]


def test_a_kept_wheel_that_does_not_work_is_built_anew(workshop, capsys):
    build_horovod.provide_horovod(INPUTS)
    kept = horovod_wheel.cached_wheel(INPUTS)
    assert kept is not None
    kept.write_text("damaged")
    build_horovod.provide_horovod(INPUTS)
    assert workshop.count("build") == 2
    assert kept.read_text() == "wheel"
    assert "built again" in capsys.readouterr().out


def test_a_failed_installation_leaves_the_wheel_and_compiles_nothing_again(workshop, monkeypatch):
    """Be it for a full disk, or a PyTorch that does not import."""
    really_install = build_horovod.install_wheel

    def fail(*_):
        raise BuildError("No space left on device")

    monkeypatch.setattr(build_horovod, "install_wheel", fail)
    with pytest.raises(BuildError, match="No space left"):
        build_horovod.provide_horovod(INPUTS)
    kept = horovod_wheel.cached_wheel(INPUTS)
    assert kept is not None
    with pytest.raises(BuildError, match=r"No space left(.|\n)*build-horovod --rebuild"):
        build_horovod.provide_horovod(INPUTS)
    assert horovod_wheel.cached_wheel(INPUTS) == kept
    monkeypatch.setattr(build_horovod, "install_wheel", really_install)
    build_horovod.provide_horovod(INPUTS)
    assert workshop == ["build", "install"]


def test_a_new_wheel_that_does_not_import_is_not_kept(workshop, monkeypatch):
    def fail(*_):
        raise build_horovod.UnfitWheelError("undefined symbol")

    monkeypatch.setattr(build_horovod, "install_wheel", fail)
    with pytest.raises(BuildError, match="undefined symbol"):
        build_horovod.provide_horovod(INPUTS)
    assert horovod_wheel.cached_wheel(INPUTS) is None


@pytest.mark.parametrize("works", [True, False])
def test_a_kept_wheel_that_no_longer_imports_is_built_anew(
    workshop, monkeypatch, tmp_path, capsys, works
):
    """Unless its framework does not import either: that is not the wheel's fault."""
    (tmp_path / "torch.py").write_text("" if works else "raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    build_horovod.provide_horovod(INPUTS)
    install_wheel = build_horovod.install_wheel

    def fail_once(*_):
        monkeypatch.setattr(build_horovod, "install_wheel", install_wheel)
        raise build_horovod.UnfitWheelError("undefined symbol")

    monkeypatch.setattr(build_horovod, "install_wheel", fail_once)
    if works:
        build_horovod.provide_horovod(INPUTS)
        assert "is built again: undefined symbol" in capsys.readouterr().out
    else:
        with pytest.raises(BuildError, match="undefined symbol"):
            build_horovod.provide_horovod(INPUTS)
    assert workshop.count("build") == 1 + works
    assert horovod_wheel.cached_wheel(INPUTS) is not None


@pytest.mark.parametrize("builds", [True, False])
def test_a_kept_wheel_stays_until_another_one_is_installed(workshop, monkeypatch, tmp_path, builds):
    """It may be good, and nothing else be there where no compiler is."""
    (tmp_path / "torch.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    build_horovod.provide_horovod(dataclasses.replace(INPUTS, tensorflow="2.21.0"))
    kept = horovod_wheel.cached_wheel(INPUTS)
    assert kept is not None
    install_wheel, build_wheel = build_horovod.install_wheel, build_horovod.build_wheel

    def install(wheel, *others):
        if wheel == kept:
            raise build_horovod.UnfitWheelError("undefined symbol")
        return install_wheel(wheel, *others)

    def build(*arguments):
        assert kept.exists()
        if not builds:
            raise BuildError("no compiler")
        return build_wheel(*arguments)

    monkeypatch.setattr(build_horovod, "install_wheel", install)
    monkeypatch.setattr(build_horovod, "build_wheel", build)
    if builds:
        build_horovod.provide_horovod(INPUTS)
        assert workshop == ["build", "install"] * 2
    else:
        with pytest.raises(BuildError, match=r"no compiler(.|\n)*undefined symbol"):
            build_horovod.provide_horovod(INPUTS)
    assert kept.exists() is not builds


def test_a_wheel_that_cannot_be_kept_is_installed(workshop, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build_horovod, "keep_wheel", fail)
    build_horovod.provide_horovod(INPUTS)
    assert workshop == ["build", "install"]
    assert "its wheel is not kept, since" in capsys.readouterr().out


def test_of_two_at_once_in_one_environment_the_second_installs_nothing(workshop, monkeypatch):
    """The first one's training may have begun."""
    answers = iter([None, INPUTS.name])  # before it waits for the lock, and after
    monkeypatch.setattr(build_horovod, "installed_build", lambda: next(answers))
    build_horovod.provide_horovod(INPUTS)
    assert workshop == []


def test_a_failed_build_keeps_nothing(workshop, monkeypatch):
    def fail(*_):
        raise BuildError("no")

    monkeypatch.setattr(build_horovod, "build_wheel", fail)
    with pytest.raises(BuildError):
        build_horovod.provide_horovod(INPUTS)
    assert horovod_wheel.cached_wheel(INPUTS) is None


def test_of_two_at_once_one_builds_and_the_other_waits_and_uses_its_wheel(
    workshop, monkeypatch, capsys
):
    building = threading.Event()
    go_on = threading.Event()
    really_build = build_horovod.build_wheel

    def slow_build(*arguments):
        building.set()
        assert go_on.wait(LIMIT_S)
        return really_build(*arguments)

    waits = threading.Event()

    def says_so(text, **_):
        if "waiting" in str(text):
            waits.set()

    monkeypatch.setattr(build_horovod, "build_wheel", slow_build)
    monkeypatch.setattr(build_horovod, "print", says_so, raising=False)
    threads = [
        threading.Thread(target=build_horovod.provide_horovod, args=(INPUTS,)) for _ in range(2)
    ]
    threads[0].start()
    assert building.wait(LIMIT_S)
    threads[1].start()
    assert waits.wait(LIMIT_S)
    go_on.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert workshop == ["build", "install", "install"]


def test_a_horovod_that_pip_has_removed_is_not_installed(tmp_path, monkeypatch):
    """pip removes what RECORD names: what was built before our note was in it is left."""
    info = tmp_path / "horovod-0.28.1.dist-info"
    info.mkdir()
    (info / horovod_wheel.INSTALLED_BUILD_FILE).write_text(INPUTS.name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(build_horovod, "_check_import", lambda *_: None)
    assert horovod_wheel.installed_build() is None

    def install(*_, **__):
        assert not (info / horovod_wheel.INSTALLED_BUILD_FILE).exists(), "it is of the former one"
        (info / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
        (info / "RECORD").write_text("horovod/__init__.py,,\n")

    monkeypatch.setattr(build_horovod, "run_quietly", install)
    build_horovod.install_wheel(tmp_path / "horovod.whl", INPUTS, tmp_path / "log")
    assert horovod_wheel.installed_build() == INPUTS.name
    assert (info / "RECORD").read_text().splitlines() == [
        "horovod/__init__.py,,",
        f"horovod-0.28.1.dist-info/{horovod_wheel.INSTALLED_BUILD_FILE},,",
    ]


# --- the command ----------------------------------------------------------------------------------


def command(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        app.main(["build-horovod", *arguments])
    return ended.value.code


def test_a_failure_is_one_message_on_stderr(workshop, monkeypatch, capsys):
    def fail(*_):
        raise BuildError("the disk is full")

    monkeypatch.setattr(build_horovod, "build_wheel", fail)
    assert command() == 1
    assert capsys.readouterr().err == "error: the disk is full\n"


@pytest.mark.parametrize(
    "name", ["EACCES", "ENOSPC", "EROFS", "ENOTDIR", "EEXIST", "ENOLCK", "ENOTSUP"]
)
def test_a_folder_that_cannot_be_written_is_named_with_the_variables(
    workshop, monkeypatch, capsys, name
):
    fault = getattr(errno, name)

    def fail(*_):
        raise OSError(fault, os.strerror(fault), "/cache/wheels")

    monkeypatch.setattr(build_horovod, "build_wheel", fail)
    assert command() == 1
    why = (
        f"error: /cache/wheels cannot be written: {os.strerror(fault)}; the wheel's folder is under"
    )
    assert f"{why} XDG_CACHE_HOME" in capsys.readouterr().err


def test_no_folder_for_temporary_files_is_an_error_with_the_variables(
    workshop, monkeypatch, capsys
):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nonexistent"])
    monkeypatch.setattr(build_horovod, "build_wheel", lambda *_: tempfile.gettempdir())
    assert command() == 1
    told = capsys.readouterr().err
    assert "No usable temporary directory found in ['/nonexistent']" in told
    assert "the build's under TMPDIR" in told


def test_what_another_folder_does_not_help_against_is_told_as_it_is(workshop, monkeypatch, capsys):
    error = OSError(errno.ENOENT, os.strerror(errno.ENOENT), "patch")

    def fail(*_):
        raise error

    monkeypatch.setattr(build_horovod, "build_wheel", fail)
    assert command() == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_no_compilers_is_wrong_usage(capsys):
    assert command("--jobs", "0") == 2
    assert "--jobs takes a whole number of 1 or more, not '0'" in capsys.readouterr().err


def test_the_name_is_printed_for_scripts(capsys):
    assert command("--print-name") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("horovod-0.28.1-cp")
    assert os.sep not in printed


def test_required_frameworks_are_those_of_the_extras():
    settings = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    for name, needs in (
        ("torch", [frameworks.TORCH_REQUIREMENT]),
        ("tensorflow", frameworks.TENSORFLOW_REQUIREMENTS),
    ):
        assert f"\n{name} = {json.dumps(list(needs))}\n" in settings
