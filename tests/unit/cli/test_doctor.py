"""The doctor's findings, its words, and its status."""

from __future__ import annotations

import json
import os
import pwd

import pytest

from hvd_elastic.cli.app import main
from hvd_elastic.cli.machine import doctor
from hvd_elastic.cli.machine.doctor import Finding, Health, render
from hvd_elastic.errors import BuildError
from hvd_elastic.install import horovod_wheel
from hvd_elastic.install.prerequisites import PREREQUISITES
from hvd_elastic.programs.nvidia import Answer

GOOD = Finding("torch", Health.GOOD, "2.13.0")
ABSENT = Finding("horovod", Health.MISSING, "not installed", "hvd-elastic build-horovod")
OPTIONAL = Finding("Open MPI", Health.OPTIONAL, "not found", "apt-get install x")


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(("findings", "status"), [([GOOD, OPTIONAL], 0), ([GOOD, ABSENT], 1)])
def test_only_what_training_needs_makes_the_status_1(monkeypatch, capsys, findings, status):
    monkeypatch.setattr(doctor, "diagnose", lambda: findings)
    assert status_of() == status
    assert capsys.readouterr().out == render(findings) + "\n"


def test_json_is_one_object_with_all_findings(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "diagnose", lambda: [GOOD, ABSENT])
    assert status_of("--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["healthy"] is False
    assert answer["findings"][1] == {
        "name": "horovod",
        "health": "missing",
        "found": "not installed",
        "mend": "hvd-elastic build-horovod",
    }


def test_what_mends_stands_under_what_is_missing():
    lines = render([GOOD, ABSENT]).splitlines()
    assert lines[1].startswith("missing   horovod")
    assert lines[2].strip() == "-> hvd-elastic build-horovod"


def test_colour_is_only_added_when_asked_for():
    assert "\x1b" not in render([GOOD, ABSENT, OPTIONAL])
    assert "\x1b[31m" in render([ABSENT], colour=True)


def test_the_real_diagnosis_names_every_part():
    names = {finding.name for finding in doctor.diagnose()}
    assert {"python", "torch", "horovod", "Open MPI", "sshd", "ip", "tc", "cmake", "g++"} <= names
    assert {"kept wheels", "home", "login shell", "virtual hosts"} <= names


def test_a_user_to_whom_sshd_gives_no_commands_is_told_so(monkeypatch):
    account = pwd.struct_passwd(("ann", "x", 1000, 1000, "", "/home/ann", "/usr/sbin/nologin"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: account)
    monkeypatch.setattr(doctor, "ask_horovod", lambda *_: ({"gloo": True}, ""))
    monkeypatch.setattr(doctor, "why_no_namespaces", lambda: None)
    found = {finding.name: finding for finding in doctor.diagnose()}
    assert found["login shell"].health is Health.OPTIONAL
    assert "user ann has the login shell /usr/sbin/nologin" in found["login shell"].found
    assert found["login shell"].mend == "as root: usermod --shell /bin/bash ann"
    assert found["virtual hosts"].health is Health.OPTIONAL


def has(monkeypatch, **versions: str | None) -> None:
    """Set the versions of installed frameworks."""
    monkeypatch.setattr(doctor, "version_of", versions.get)
    monkeypatch.setattr(doctor, "tensorflow_version", lambda: versions.get("tensorflow"))


@pytest.mark.parametrize(
    ("versions", "torch", "tensorflow", "told"),
    [
        ({"torch": "2.13.0"}, Health.GOOD, Health.OPTIONAL, "not installed"),
        ({"tensorflow": "2.21.0", "keras": "3.15.1"}, Health.OPTIONAL, Health.GOOD, "Keras 3.15.1"),
        ({}, Health.MISSING, Health.MISSING, "not installed"),
        ({"torch": "2.9.1"}, Health.MISSING, Health.MISSING, "not installed"),
        ({"torch": "2.15.0"}, Health.OPTIONAL, Health.OPTIONAL, "not installed"),
        (
            {"tensorflow": "2.15.1", "keras": "2.15.0"},
            *[Health.MISSING] * 2,
            "TensorFlow 2.15.1 is",
        ),
    ],
)
def test_one_framework_that_fits_is_enough(monkeypatch, versions, torch, tensorflow, told):
    has(monkeypatch, **versions)
    found = doctor._frameworks()
    assert [finding.health for finding in found] == [torch, tensorflow]
    assert told in found[1].found
    assert all(
        ("pip install" in finding.mend) is (finding.health is not Health.GOOD) for finding in found
    )


def test_a_triton_beside_tensorflow_is_told_of(monkeypatch):
    monkeypatch.setattr(doctor, "has_triton", lambda: True)
    has(monkeypatch, torch="2.13.0")
    assert len(doctor._frameworks()) == 2
    has(monkeypatch, torch="2.13.0", tensorflow="2.21.0", keras="3.15.1")
    finding = doctor._frameworks()[2]
    assert finding.health is Health.OPTIONAL
    assert "signal 11" in finding.found
    assert "write `import triton` before" in finding.mend


def test_lightning_is_told_of_where_it_is_installed(monkeypatch):
    for version, health in ((None, None), ("2.6.6", Health.GOOD), ("2.4.0", Health.OPTIONAL)):
        monkeypatch.setattr(doctor, "version_of", lambda *_, version=version: version)
        assert [each.health for each in doctor._lightning()] == [health] * (version is not None)


def test_transformers_are_told_of_where_they_are_installed(monkeypatch):
    for version, accelerate, health in (
        (None, None, []),
        ("5.24.0", "1.15.0", [Health.GOOD]),
        ("5.24.0", None, [Health.OPTIONAL]),
        ("4.57.0", "1.15.0", [Health.OPTIONAL]),
    ):
        has(monkeypatch, transformers=version, accelerate=accelerate)
        assert [each.health for each in doctor._transformers()] == health


def test_a_torch_that_does_not_fit_is_told_with_the_reason(monkeypatch):
    for version, why in (("2.9.1", "CVE-2026-24747"), ("2.15.0", "known to compile for torch>=")):
        has(monkeypatch, torch=version)
        assert why in doctor._frameworks()[0].found


def test_versions_out_of_the_range_of_the_package_are_told(monkeypatch):
    needs = ["paramiko>=99", "numpy>=1", "absent-package", 'torch>=99; extra == "torch"']
    needs += ["absent-of-old-pythons; python_version < '3'"]
    monkeypatch.setattr(doctor, "_requirements", lambda: (">=3.99", needs))
    paramiko, numpy, absent = doctor._packages()
    assert paramiko.health is absent.health is Health.MISSING
    assert paramiko.found.endswith(", and hvd_elastic needs >=99")
    assert "pip install 'paramiko>=99'" in paramiko.mend
    assert numpy.health is Health.GOOD
    assert "hvd_elastic needs >=3.99" in doctor._python().found
    assert doctor._python().health is Health.MISSING


def test_a_root_that_may_not_make_namespaces_is_told_so(monkeypatch):
    monkeypatch.setattr(doctor, "why_no_namespaces", lambda: "this root may not make namespaces")
    assert doctor._virtual_hosts().found == "loopback only: this root may not make namespaces"


def test_a_horovod_without_nccl_on_a_machine_with_a_gpu_is_told(monkeypatch):
    has(monkeypatch, torch="2.13.0", horovod="0.28.1")
    monkeypatch.setattr(doctor, "torch_cuda", lambda: "13.0")
    for gpu, build, nccl, told in (
        (True, "horovod-0.28.1-patch-0123", False, "without NCCL"),
        (True, "", False, "without NCCL"),
        (True, "", True, "not our patched build"),
        (True, "horovod-0.28.1-nccl-2.29.7-patch-0123", True, None),
        (False, "horovod-0.28.1-patch-0123", False, None),
    ):
        answer = {"gloo": True, "nccl": nccl}, ""
        monkeypatch.setattr(doctor, "ask_horovod", lambda *_, answer=answer: answer)
        monkeypatch.setattr(doctor, "has_gpu", lambda gpu=gpu: gpu)
        monkeypatch.setattr(doctor, "installed_build", lambda build=build: build)
        finding = doctor._horovod()
        assert finding.health is (Health.OPTIONAL if told else Health.GOOD)
        assert (told or "") in finding.found


def test_on_gpus_building_again_is_not_advised_for_tensorflow(monkeypatch):
    """It is left out there, with NCCL."""
    has(monkeypatch, torch="2.13.0", tensorflow="2.21.0", keras="3.15.1", horovod="0.28.1")
    monkeypatch.setattr(horovod_wheel, "tensorflow_version", lambda: "2.21.0")
    monkeypatch.setattr(doctor, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(doctor, "has_gpu", lambda: True)
    monkeypatch.setattr(doctor, "installed_build", lambda: "horovod-0.28.1-cuda-13.0-patch-0123")
    answers = {"torch": ({"gloo": True, "nccl": True}, ""), "tensorflow": (None, "no library")}
    monkeypatch.setattr(doctor, "ask_horovod", lambda name, _: answers[name])
    assert "--without-nccl builds for both frameworks on CPUs" in doctor._horovod().mend
    answers = {"torch": (None, "no library"), "tensorflow": ({"gloo": True}, "")}
    assert doctor._horovod().mend == "hvd-elastic build-horovod"


def test_a_horovod_without_a_framework_is_not_well(monkeypatch):
    has(monkeypatch, horovod="0.28.1")
    monkeypatch.setattr(doctor, "installed_build", lambda: "horovod-0.28.1-patch-0123")
    finding = doctor._horovod()
    assert (finding.health, finding.found) == (
        Health.MISSING,
        "0.28.1; no framework to train with",
    )


def nvidia_smi(monkeypatch: pytest.MonkeyPatch, lines: list[str], status: int | None) -> None:
    answer = Answer(lines, status, "" if status == 0 else "it timed out after 8 s")
    for module in (doctor, horovod_wheel):
        monkeypatch.setattr(module, "ask_nvidia_smi", lambda *_: answer)


def test_a_pytorch_for_cpus_beside_a_gpu_is_told(monkeypatch):
    nvidia_smi(monkeypatch, ["NVIDIA H200"], 0)
    has(monkeypatch, torch="2.13.0+cpu")
    for cuda, health in ((None, Health.OPTIONAL), ("13.0", Health.GOOD)):
        monkeypatch.setattr(doctor, "torch_cuda", lambda cuda=cuda: cuda)
        assert doctor._gpu().health is health
    has(monkeypatch, tensorflow="2.21.0", keras="3.15.1")
    monkeypatch.setattr(doctor, "torch_cuda", lambda: None)
    assert doctor._gpu().health is Health.GOOD


def test_an_nvidia_smi_that_does_not_answer_does_not_mean_that_there_is_no_gpu(monkeypatch):
    nvidia_smi(monkeypatch, [], None)
    torch = {"__version__": "2.13.0+cu130", "cuda": "13.0"}
    monkeypatch.setattr(horovod_wheel, "_torch_facts", lambda: torch)
    with pytest.raises(BuildError, match=r"\(it timed out after 8 s\).* --with-nccl or"):
        horovod_wheel.detect_inputs("x")
    assert horovod_wheel.detect_inputs("x", with_nccl=False).cuda is None
    has(monkeypatch, torch="2.13.0+cu130", horovod="0.28.1")
    monkeypatch.setattr(doctor, "installed_build", lambda: "horovod-0.28.1-patch-0123")
    monkeypatch.setattr(doctor, "ask_horovod", lambda *_: ({"gloo": True, "nccl": False}, ""))
    assert doctor._horovod().health is Health.GOOD
    assert doctor._gpu().found == "nvidia-smi does not answer"


def test_no_prerequisite_keeps_this_machine_from_training(monkeypatch, tmp_path):
    """Not even ssh: connections are paramiko's."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("hvd_elastic.install.prerequisites.SYSTEM_FOLDERS", ())
    found = {item.name: doctor._prerequisite(item) for item in PREREQUISITES}
    assert found["ssh"].found.startswith("not found")
    assert Health.MISSING not in {each.health for each in found.values()}


def test_an_mpirun_of_mpich_is_no_open_mpi(monkeypatch, tmp_path):
    for name in ("mpirun", "mpicxx"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'Unable to interpret --showme' >&2\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (openmpi,) = (item for item in PREREQUISITES if item.name == "Open MPI")
    assert doctor._prerequisite(openmpi).health is Health.OPTIONAL


@pytest.mark.parametrize(
    ("works", "health", "told"),
    [
        (
            {"torch", "tensorflow"},
            Health.GOOD,
            "0.28.1 built for PyTorch (gloo yes, mpi no) and Tens",
        ),
        ({"torch"}, Health.OPTIONAL, "PyTorch (gloo yes, mpi no); not for TensorFlow: no library"),
        (set(), Health.MISSING, "of no use; not for PyTorch: no library; TensorFlow: no library"),
    ],
)
def test_what_horovod_is_built_for_is_told_for_each_framework(monkeypatch, works, health, told):
    has(monkeypatch, torch="2.13.0", tensorflow="2.21.0", keras="3.15.1", horovod="0.28.1")
    monkeypatch.setattr(doctor, "installed_build", lambda: "horovod-0.28.1-patch-0123")
    answers = {name: ({"gloo": True, "mpi": False}, "") for name in works}
    monkeypatch.setattr(
        doctor, "ask_horovod", lambda name, _: answers.get(name, (None, "no library"))
    )
    finding = doctor._horovod()
    assert finding.health is health
    assert told in finding.found
    assert bool(finding.mend) is (health is not Health.GOOD)


def test_horovod_is_named_by_its_build_where_it_is_not_imported(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "ask_horovod", None)
    monkeypatch.setattr(doctor, "installed_build", lambda: "horovod-0.28.1-torch-2.13.0")
    finding = doctor._horovod(imports=False)
    assert "horovod-0.28.1-torch-2.13.0; not imported" in finding.found


def test_a_home_that_cannot_be_written_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr("os.access", lambda *_: False)
    finding = doctor._home(tmp_path / "not" / "yet")
    assert finding.health is Health.MISSING
    assert "HVD_ELASTIC_HOME" in finding.mend
