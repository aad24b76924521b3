"""Faults of GPUs and memory, as read from NVML and the kernel's log."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_elastic.agent.hardware import _PROGRAM
from hvd_elastic.programs import hardware
from hvd_elastic.programs.hardware import read_hardware
from hvd_elastic.programs.nvml import NvmlFaults
from tests.unit.played_nvml import build_nvml

WELL = {
    "index": 0, "bus": "00000000:18:00.0", "name": "NVIDIA H100 80GB HBM3", "lost": False,
    "corrected": 0, "uncorrected": 0, "repair_pending": False, "repair_failed": False,
    "width": 8, "most_width": 16, "held_down_by": [], "action": "",
}  # fmt: skip
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


def test_what_is_read_on_a_host(
    nvml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "NvmlFaults", lambda: NvmlFaults(str(nvml)))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "dmesg.text").write_text(LOG)
    (tmp_path / "dmesg").write_text(f'#!/bin/sh\ncat "{tmp_path}/dmesg.text"\n')
    (tmp_path / "dmesg").chmod(0o755)
    for controller, errors in (("mc0", "2"), ("mc1", "3")):
        (tmp_path / controller).mkdir()
        (tmp_path / controller / "ue_count").write_text("0\n")
        (tmp_path / controller / "ce_count").write_text(f"{errors}\n")
    monkeypatch.setattr(hardware, "EDAC", tmp_path)
    found = read_hardware()
    assert [gpu["held_down_by"] for gpu in found["gpus"]] == [[], ["its power supply"], []]
    buses = [(bus, xid) for bus, xid, *_ in found["xids"]]
    assert buses == [("0000:18:00", 79), ("0000:19:00", 31), ("0018:01:00", 149)]
    assert " Fatal " in found["xids"][2][2]
    assert (found["machine_checks"], found["machine_checks_uncorrected"]) == (2, 2)
    assert (found["memory_uncorrected"], found["memory_corrected"]) == (0, 5)
    (tmp_path / "dmesg").write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setattr(hardware, "NvmlFaults", lambda: NvmlFaults("libno-such-library.so.1"))
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


def test_faults_of_gpus_by_nvml(nvml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = NvmlFaults(str(nvml))
    well, faulty, lost = gpus.read()
    assert well == WELL
    expected = {
        "index": 1, "bus": "00000000:19:00.0", "action": "Drain and Reset",
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
    monkeypatch.setattr("hvd_elastic.programs.nvml._MOST_EVENTS", 50_000)
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
