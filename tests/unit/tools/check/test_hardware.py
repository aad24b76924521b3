"""Faults of GPUs and memory: what is read, and what it is taken for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.programs import hardware
from hvd_elastic.programs.hardware import gpus_of, read_hardware
from hvd_elastic.tools.check.checks import Level
from hvd_elastic.tools.check.hardware import judge_hardware

# The parts of an answer of `nvidia-smi -q -x` that are read, of driver 550.
REPORT = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>550.54.15</driver_version>
  <gpu id="00000000:18:00.0">
    <pci><pci_gpu_link_info><link_widths>
      <max_link_width>16x</max_link_width><current_link_width>16x</current_link_width>
    </link_widths></pci_gpu_link_info></pci>
    <clocks_event_reasons>
      <clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
      <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
    </clocks_event_reasons>
    <ecc_errors><volatile>
      <sram_correctable>0</sram_correctable>
      <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
      <dram_correctable>0</dram_correctable>
      <dram_uncorrectable>0</dram_uncorrectable>
    </volatile></ecc_errors>
    <retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
    <remapped_rows>
      <remapped_row_pending>No</remapped_row_pending>
      <remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
  </gpu>
</nvidia_smi_log>
"""
WELL: dict[str, Any] = {
    "gpus": gpus_of(REPORT),
    "xids": [],
    "machine_checks": 0,
    "memory_uncorrected": 0,
    "memory_corrected": 12,
}


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ("dram_correctable>0<", "dram_correctable>5000<", "GPU 0: 5000 corrected memory errors. "),
        ("pending>No<", "pending>Yes<", "is repaired when it is reset. "),
        ("retirement>N/A<", "retirement>Yes<", "is repaired when it is reset. "),
        ("failure>No<", "failure>Yes<", "cannot be repaired any more. "),
        ("current_link_width>16x", "current_link_width>8x", "8 PCIe lanes of 16. "),
        ("thermal_slowdown>Not Active", "thermal_slowdown>Active", "held down by heat. "),
        ("clocks_event_reason_sw_power_cap", "clocks_event_reason_hw_power_brake_slowdown",
         "held down by its power supply. "),
    ],
)  # fmt: skip
def test_faults_of_a_gpu(good: str, bad: str, words: str) -> None:
    assert good in REPORT
    (check,) = judge_hardware({**WELL, "gpus": gpus_of(REPORT.replace(good, bad))})
    assert check.name == "gpu hardware"
    assert check.level is (Level.FAILED if "any more" in words else Level.WARNING)
    assert words in check.detail
    (check,) = judge_hardware({**WELL, "gpus": gpus_of(REPORT.replace(good, bad))}, gpus=False)
    assert check.level is Level.OK


def test_older_drivers_name_the_clocks_otherwise() -> None:
    older = REPORT.replace("clocks_event_reason", "clocks_throttle_reason")
    assert gpus_of(older) == gpus_of(REPORT)
    hot = older.replace("thermal_slowdown>Not Active", "thermal_slowdown>Active")
    assert gpus_of(hot)[0]["held_down_by"] == ["heat"]


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, Level.OK, "no faults known"),
        ({"xids": None}, Level.OK, "no faults known; the kernel's log cannot be read"),
        ({"xids": [["0000:18:00", 31]]}, Level.OK, "no faults known"),  # of a program
        ({"xids": [["0000:18:00", 79]] * 2}, Level.WARNING, "Xid 79 (fell off the bus) 2 times"),
        ({"machine_checks": 3}, Level.WARNING, "3 machine checks"),
        ({"memory_corrected": 1000}, Level.WARNING, "1000 corrected memory errors of the host"),
        ({"memory_uncorrected": 1}, Level.FAILED, "1 uncorrected memory error of the host"),
        ({"memory_uncorrected": None, "memory_corrected": None}, Level.OK, "no faults known"),
    ],
)
def test_faults_of_a_host(changes: dict[str, Any], level: Level, words: str) -> None:
    (check,) = judge_hardware({**WELL, **changes})
    assert check.level is level
    assert words in check.detail


def test_what_is_read_on_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    log = (
        "[ 7.1] NVRM: Xid (PCI:0000:18:00): 79, pid=1234, GPU has fallen off the bus.\n"
        "[ 8.2] NVRM: Xid (0000:19:00): 31, Ch 00000010\n"
        "[ 9.3] mce: [Hardware Error]: Machine check events logged\n"
    )
    for name, text in (("nvidia-smi", f"a warning of it\n{REPORT}"), ("dmesg", log)):
        (tmp_path / f"{name}.text").write_text(text)
        (tmp_path / name).write_text(f'#!/bin/sh\ncat "{tmp_path}/{name}.text"\n')
        (tmp_path / name).chmod(0o755)
    for controller, errors in (("mc0", "2"), ("mc1", "3")):
        (tmp_path / controller).mkdir()
        (tmp_path / controller / "ue_count").write_text("0\n")
        (tmp_path / controller / "ce_count").write_text(f"{errors}\n")
    monkeypatch.setattr(hardware, "EDAC", tmp_path)
    found = read_hardware()
    assert found["gpus"] == gpus_of(REPORT)
    assert found["xids"] == [["0000:18:00", 79], ["0000:19:00", 31]]
    assert (found["machine_checks"], found["memory_uncorrected"]) == (1, 0)
    assert found["memory_corrected"] == 5
    (tmp_path / "dmesg").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "nvidia-smi.text").write_text("No devices were found\n")
    found = read_hardware()
    assert (found["gpus"], found["xids"], found["machine_checks"]) == ([], None, None)
