"""What is made of nvidia-smi's words: a program of that name prints lines as it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_elastic.programs.clear_left import held_gpus
from hvd_elastic.programs.look_at_host import gpus


@pytest.fixture
def prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What nvidia-smi prints; without it there is none."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncat "{tmp_path}/text"; exit $(cat "{tmp_path}/status")\n')
    program.chmod(0o755)
    (tmp_path / "status").write_text("0")
    return tmp_path / "text"


def test_gpus_that_are_well(prints: Path) -> None:
    prints.write_text(
        "0, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4\n"
        "1, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 70021\n"
    )
    found = gpus()
    assert found["gpu_error"] is None
    assert [gpu["memory.used"] for gpu in found["gpus"]] == ["4", "70021"]
    assert found["gpus"][0]["driver_version"] == "550.54.15"


def test_a_gpu_that_fell_off_is_said_in_nvidia_smis_words(prints: Path) -> None:
    words = "Unable to determine the device handle for GPU0000:1C:00.0: GPU is lost."
    prints.write_text(f"{words}\n")
    prints.with_name("status").write_text("15")
    assert gpus() == {"gpus": [], "gpu_error": words}
    prints.write_text("")
    assert gpus()["gpu_error"] == "exit status 15"


def test_who_holds_memory(prints: Path) -> None:
    prints.write_text("00000000:1C:00.0, 1, 70000\n00000000:1D:00.0, 999999999, 120\n")
    first, second = held_gpus()
    assert first.startswith("GPU 00000000:1C:00.0: process 1 (")
    assert first.endswith(") 70000 MB")
    assert second == "GPU 00000000:1D:00.0: process 999999999 (not seen from here) 120 MB"
    prints.write_text("No devices were found\n")
    assert held_gpus() == []


def test_a_host_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == {"gpus": [], "gpu_error": None}
    assert held_gpus() == []
