"""Read what a host knows of faults of its GPUs and memory; standard library only, sent to hosts."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from hvd_elastic.programs.nvidia import ask_nvidia_smi

LIMIT_S = 5.0
EDAC = Path("/sys/devices/system/edac/mc")
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)(?:, (.*))?")
_MACHINE_CHECK = re.compile(r"\[Hardware Error\]: Machine check events logged")
_UNCORRECTED = re.compile(
    r"\[Hardware Error\]:.*(?:System Fatal|Uncorrected|event severity: (?:fatal|recoverable))"
)
_HELD_DOWN = {
    "hw_thermal_slowdown": "heat",
    "sw_thermal_slowdown": "heat",
    "hw_power_brake_slowdown": "its power supply",
}
"""Endings of the names of reasons for which a GPU's clocks are held down; a reached power limit is
normal."""


def read_hardware() -> dict[str, Any]:
    """Return faults of GPUs, of memory, and those in the kernel's log; None where not known."""
    answer = ask_nvidia_smi("-q", "-x")
    gpus = [] if answer is None else gpus_of("\n".join(answer.lines))
    return {"gpus": gpus, **read_log_and_memory()}


def read_log_and_memory() -> dict[str, Any]:
    """Return faults of memory and those in the kernel's log; None where not known."""
    log = _kernel_log()
    xids = Counter(_XID.findall(log or ""))
    told = [[bus, int(xid), text, times] for (bus, xid, text), times in xids.items()]
    return {
        "xids": None if log is None else told,
        "machine_checks": None if log is None else len(_MACHINE_CHECK.findall(log)),
        "machine_checks_uncorrected": None if log is None else len(_UNCORRECTED.findall(log)),
        "memory_uncorrected": _edac("ue_count"),
        "memory_corrected": _edac("ce_count"),
    }


def gpus_of(text: str) -> list[dict[str, Any]]:
    """Return the faults of each GPU by the answer to ``nvidia-smi -q -x``; [] if it is none."""
    try:
        root = ET.fromstring(text[text.find("<") :])
    except ET.ParseError:
        return []
    found = []
    for index, gpu in enumerate(root.findall("gpu")):
        volatile = gpu.find("ecc_errors/volatile")
        counts = [] if volatile is None else [(each.tag, _number(each.text)) for each in volatile]
        old = "ecc_errors/volatile/{}_bit/total"  # of GPUs before Turing
        pages = [gpu.findtext("retired_pages/pending_retirement")]
        pages += [gpu.findtext("retired_pages/pending_blacklist")]
        width = "pci/pci_gpu_link_info/link_widths/{}_link_width"
        action = gpu.findtext("gpu_recovery_action") or ""
        found.append(
            {
                "index": index,
                "bus": gpu.get("id", ""),
                "name": gpu.findtext("product_name") or "",
                "corrected": sum(n for tag, n in counts if "_correctable" in tag)
                + _number(gpu.findtext(old.format("single"))),
                "uncorrected": sum(n for tag, n in counts if "_uncorrectable" in tag)
                + _number(gpu.findtext(old.format("double"))),
                "repair_pending": "Yes" in pages
                or gpu.findtext("remapped_rows/remapped_row_pending") == "Yes",
                "repair_failed": gpu.findtext("remapped_rows/remapped_row_failure") == "Yes",
                "width": _number((gpu.findtext(width.format("current")) or "").rstrip("x")),
                "most_width": _number((gpu.findtext(width.format("max")) or "").rstrip("x")),
                "held_down_by": sorted(set(_reasons(gpu))),
                "action": "" if action in ("None", "N/A") else action,
            }
        )
    return found


def _reasons(gpu: ET.Element) -> Iterator[str]:
    # Newer drivers call them "event", older ones "throttle".
    for kind in ("event", "throttle"):
        for each in gpu.findall(f"clocks_{kind}_reasons/*"):
            word = _HELD_DOWN.get(each.tag.partition("_reason_")[2])
            if word is not None and each.text == "Active":
                yield word


def _number(text: str | None) -> int:
    """Return a whole number; 0 for N/A."""
    return int(text) if text is not None and text.isdecimal() else 0


def _kernel_log() -> str | None:
    """Return the kernel's log; None where this user may not read it."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["dmesg"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode == 0:
            return done.stdout.decode("utf-8", "replace")
    return None


def _edac(name: str) -> int | None:
    """Return the sum of a counter of all memory controllers; None if there are none."""
    found = []
    for path in EDAC.glob(f"mc*/{name}"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(path.read_text()))
    return sum(found) if found else None
