"""Faults of GPUs and memory, as nvidia-smi, NVML and the kernel's log tell them."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.agent.hardware import _PROGRAM
from hvd_elastic.programs import hardware, watch_hardware
from hvd_elastic.programs.hardware import gpus_of, read_hardware
from hvd_elastic.programs.watch_hardware import NvmlFaults
from tests.unit.played_nvml import build_nvml

REPORT = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>550.54.15</driver_version>
  <gpu id="00000000:18:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <pci><pci_gpu_link_info><link_widths>
      <max_link_width>16x</max_link_width><current_link_width>8x</current_link_width>
    </link_widths></pci_gpu_link_info></pci>{}
  </gpu>
</nvidia_smi_log>
"""
WELL = {
    "index": 0, "bus": "00000000:18:00.0", "name": "NVIDIA H100 80GB HBM3",
    "corrected": 0, "uncorrected": 0, "repair_pending": False, "repair_failed": False,
    "width": 8, "most_width": 16, "held_down_by": [], "action": "",
}  # fmt: skip
NONE = """<ecc_errors><volatile>
<sram_correctable>N/A</sram_correctable><sram_uncorrectable_parity>N/A</sram_uncorrectable_parity>
<dram_correctable>N/A</dram_correctable><dram_uncorrectable>N/A</dram_uncorrectable>
</volatile></ecc_errors><remapped_rows>N/A</remapped_rows>
<gpu_recovery_action>None</gpu_recovery_action>"""
V100 = """<ecc_errors><volatile>
<single_bit><device_memory>4</device_memory><l2_cache>1</l2_cache><total>5</total></single_bit>
<double_bit><device_memory>0</device_memory><cbu>N/A</cbu><total>2</total></double_bit>
</volatile></ecc_errors>
<retired_pages><pending_blacklist>Yes</pending_blacklist></retired_pages>
<clocks_throttle_reasons>
<clocks_throttle_reason_sw_power_cap>Active</clocks_throttle_reason_sw_power_cap>
<clocks_throttle_reason_hw_slowdown>Active</clocks_throttle_reason_hw_slowdown>
<clocks_throttle_reason_hw_thermal_slowdown>Active</clocks_throttle_reason_hw_thermal_slowdown>
</clocks_throttle_reasons>"""
A100 = """<ecc_errors><volatile>
<sram_correctable>1</sram_correctable><sram_uncorrectable>0</sram_uncorrectable>
<dram_correctable>6</dram_correctable><dram_uncorrectable>1</dram_uncorrectable>
</volatile><aggregate><dram_correctable>99</dram_correctable></aggregate></ecc_errors>
<retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
<remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_unc>1</remapped_row_unc>
<remapped_row_pending>Yes</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
</remapped_rows>"""
H100 = """<ecc_errors><volatile>
<sram_correctable>0</sram_correctable><sram_uncorrectable_parity>1</sram_uncorrectable_parity>
<sram_uncorrectable_secded>2</sram_uncorrectable_secded>
<dram_correctable>0</dram_correctable><dram_uncorrectable>0</dram_uncorrectable>
</volatile></ecc_errors>
<remapped_rows><remapped_row_pending>No</remapped_row_pending>
<remapped_row_failure>Yes</remapped_row_failure></remapped_rows>
<clocks_event_reasons>
<clocks_event_reason_hw_power_brake_slowdown>Active</clocks_event_reason_hw_power_brake_slowdown>
<clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
</clocks_event_reasons>
<gpu_recovery_action>Drain and Reset</gpu_recovery_action>"""


@pytest.mark.parametrize(
    ("part", "faults"),
    [
        pytest.param(NONE, {}, id="GeForce, drivers 470 to 595"),
        pytest.param(
            V100,
            {"corrected": 5, "uncorrected": 2, "repair_pending": True, "held_down_by": ["heat"]},
            id="V100, drivers to 535",
        ),
        pytest.param(
            A100,
            {"corrected": 7, "uncorrected": 1, "repair_pending": True},
            id="A100, drivers to 535",
        ),
        pytest.param(
            H100,
            {
                "uncorrected": 3,
                "repair_failed": True,
                "held_down_by": ["its power supply"],
                "action": "Drain and Reset",
            },
            id="H100, drivers from 550",
        ),
    ],
)
def test_each_generation_of_gpus_and_drivers_has_names_of_its_own(
    part: str, faults: dict[str, Any]
) -> None:
    assert gpus_of(REPORT.format(part)) == [{**WELL, **faults}]


LOG = """\
[ 7.1] NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 7.2] NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.
[ 8.2] NVRM: Xid (0000:19:00): 31, Ch 00000010, engmask 00000101, intr 10000000
[ 8.3] NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x004525c6 0x00000000)
[ 9.3] mce: [Hardware Error]: Machine check events logged
[ 9.4] [Hardware Error]: Corrected error, no action required.
[ 9.5] [Hardware Error]: CPU:0 (19:61:2) MC21_STATUS[Over|CE|MiscV|AddrV|-|-|SyndV|CECC]: 0xdc204000
[10.1] mce: [Hardware Error]: Machine check events logged
[10.2] [Hardware Error]: System Fatal error.
[10.3] {1}[Hardware Error]: event severity: corrected
[10.4] {2}[Hardware Error]: event severity: fatal
"""


def test_what_is_read_on_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, text in (("nvidia-smi", f"a warning of it\n{REPORT}"), ("dmesg", LOG)):
        (tmp_path / f"{name}.text").write_text(text)
        (tmp_path / name).write_text(f'#!/bin/sh\ncat "{tmp_path}/{name}.text"\n')
        (tmp_path / name).chmod(0o755)
    for controller, errors in (("mc0", "2"), ("mc1", "3")):
        (tmp_path / controller).mkdir()
        (tmp_path / controller / "ue_count").write_text("0\n")
        (tmp_path / controller / "ce_count").write_text(f"{errors}\n")
    monkeypatch.setattr(hardware, "EDAC", tmp_path)
    found = read_hardware()
    assert [gpu["index"] for gpu in found["gpus"]] == [0]
    buses = [(bus, xid) for bus, xid, *_ in found["xids"]]
    assert buses == [("0000:18:00", 79), ("0000:19:00", 31), ("0018:01:00", 149)]
    assert " Fatal " in found["xids"][2][2]
    assert (found["machine_checks"], found["machine_checks_uncorrected"]) == (2, 2)
    assert (found["memory_uncorrected"], found["memory_corrected"]) == (0, 5)
    (tmp_path / "dmesg").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "nvidia-smi.text").write_text("No devices were found\n")
    found = read_hardware()
    assert (found["gpus"], found["xids"], found["machine_checks"]) == ([], None, None)


NVML = """
#include <string.h>
#include <stdlib.h>
typedef unsigned long long u64;
static int faulty(void *gpu) { return gpu == (void *)0x7fff00000001; }
int events = 1;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **gpu) {
    *gpu = (void *)(0x7fff00000000 + index); return 0;
}
int nvmlDeviceGetName(void *gpu, char *name, unsigned int length) {
    strncpy(name, "NVIDIA H100 80GB HBM3", length); return 0;
}
typedef struct {
    char busIdLegacy[16]; unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} pci_t;
int nvmlDeviceGetPciInfo_v3(void *gpu, pci_t *pci) {
    strcpy(pci->busIdLegacy, "legacy");
    strcpy(pci->busId, faulty(gpu) ? "00000000:19:00.0" : "00000000:18:00.0"); return 0;
}
int nvmlDeviceGetTotalEccErrors(void *gpu, int type, int counter, u64 *count) {
    if (gpu == (void *)0x7fff00000002) return 15;  /* NVML_ERROR_GPU_IS_LOST */
    if (counter != 0) return 2;
    *count = faulty(gpu) ? (type ? 2 : 5000000000ULL) : 0; return 0;
}
int nvmlDeviceGetRetiredPagesPendingStatus(void *gpu, int *pending) { return 3; }
int nvmlDeviceGetRemappedRows(void *gpu, unsigned int *corrected, unsigned int *uncorrected,
                              unsigned int *pending, unsigned int *failure) {
    *corrected = 7; *uncorrected = 8; *pending = faulty(gpu); *failure = 0; return 0;
}
int nvmlDeviceGetCurrPcieLinkWidth(void *gpu, unsigned int *width) { *width = 8; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *gpu, unsigned int *width) { *width = 16; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, u64 *reasons) {
    *reasons = faulty(gpu) ? 0x4 | 0x8 | 0x80 : 0x4; return 0;
}
typedef struct {
    unsigned int fieldId, scopeId; long long timestamp, latencyUsec; int valueType, nvmlReturn;
    union { unsigned int ui; u64 ull; } value;
} field_t;
int nvmlDeviceGetFieldValues(void *gpu, int count, field_t *fields) {
    fields->nvmlReturn = !(fields->fieldId == 230 && count == 1);
    fields->value.ui = faulty(gpu) ? 4 : 0; return 0;
}
typedef struct { void *device; u64 type, data; unsigned int gpuInstance, computeInstance; } event_t;
int nvmlEventSetCreate(void **set) { *set = (void *)0x7fff00000100; return 0; }
int nvmlDeviceRegisterEvents(void *gpu, u64 types, void *set) {
    return types == 8 && set == (void *)0x7fff00000100 ? 0 : 2;
}
int nvmlEventSetWait_v2(void *set, event_t *event, unsigned int timeout) {
    if (set != (void *)0x7fff00000100 || timeout != 0 || events-- <= 0) return 10;
    event->device = (void *)0x7fff00000001; event->type = 8; event->data = 79; return 0;
}
"""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a library that answers as NVML does where one GPU of three is lost."""
    return build_nvml(tmp_path_factory.mktemp("nvml"), NVML)


def test_nvml_tells_the_same_as_nvidia_smi(nvml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = NvmlFaults(str(nvml))
    well, faulty, lost = gpus.read()
    assert well == {**WELL, "lost": False}
    expected = {
        "index": 1, "bus": "00000000:19:00.0", "lost": False, "action": "Drain and Reset",
        "corrected": 5_000_000_000, "uncorrected": 2, "repair_pending": True,
    }  # fmt: skip
    assert faulty == {**WELL, **expected}, "clocks that are held down for a moment are normal"
    assert gpus.read()[1]["held_down_by"] == ["its power supply"]
    assert lost["lost"]
    assert gpus.xids() == [("00000000:19:00.0", 79, "", 1)]
    assert gpus.xids() == [("00000000:19:00.0", 79, "", 1)], "those so far"
    ctypes.c_int.in_dll(ctypes.CDLL(str(nvml)), "events").value = 50_000
    for times in (1001, 2001):
        assert gpus.xids() == [("00000000:19:00.0", 79, "", times)], "a part of a flood at a time"
    monkeypatch.setattr(watch_hardware, "_MOST_EVENTS", 50_000)
    assert gpus.xids() == [("00000000:19:00.0", 79, "", 50_001)], "and none is lost"
    assert NvmlFaults("libno-such-library.so.1").read() == []


def test_the_process_tells_of_the_hardware_until_its_input_ends(nvml: Path, tmp_path: Path) -> None:
    (tmp_path / "dmesg").write_text("#!/bin/sh\nexit 1\n")  # as for most users
    (tmp_path / "dmesg").chmod(0o755)
    variables = {**os.environ, "LD_LIBRARY_PATH": str(nvml.parent), "PATH": str(tmp_path)}
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        process.stdin.close()
        assert process.stdout.read() == b""
    assert process.returncode == 0
    assert [gpu["lost"] for gpu in found["gpus"]] == [False, False, True]
    assert found["xids"] == [["00000000:19:00.0", 79, "", 1]], "also without the kernel's log"
