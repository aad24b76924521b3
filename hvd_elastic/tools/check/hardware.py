"""Judge what a host knows of faults of its GPUs and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from hvd_elastic.formatting import count
from hvd_elastic.tools.check.checks import Check, Level

MANY_CORRECTED = 1000
"""Corrected memory errors since the last reset from which a module is likely to fail."""
_RESET = "Reset it (nvidia-smi -r), or have it replaced if that does not help"
_XIDS = {
    48: "uncorrected memory error",
    62: "halted",
    63: "memory to be repaired at the next reset",
    64: "memory cannot be repaired",
    74: "NVLink error",
    79: "fell off the bus",
    92: "many corrected memory errors",
    94: "uncorrected memory error, contained",
    95: "uncorrected memory error, not contained",
    119: "its firmware does not answer",
    120: "error of its firmware",
}
"""Xid events that tell of a broken GPU; most others are faults of programs."""


def judge_hardware(found: Mapping[str, Any], *, gpus: bool = True) -> list[Check]:
    """Return what is wrong with the hardware of a host; "hardware" is OK if nothing is.

    Args:
        found: answer of ``programs/hardware.py``.
        gpus: whether the GPUs matter.
    """
    checks = [*_judge_memory(found)]
    if gpus:
        checks += _judge_gpus(found["gpus"])
        checks += _judge_xids(found["xids"] or ())
    if not checks:
        unknown = "" if found["xids"] is not None else "; the kernel's log cannot be read"
        checks.append(Check("hardware", Level.OK, f"no faults known{unknown}"))
    return checks


def _judge_memory(found: Mapping[str, Any]) -> Iterable[Check]:
    where = "Move its memory modules, or have them replaced (edac-util -v names them)"
    if errors := found["memory_uncorrected"]:
        text = f"{count(errors, 'uncorrected memory error')} of the host since it started"
        yield Check("hardware", Level.FAILED, f"{text}. {where}")
    if (errors := found["memory_corrected"] or 0) >= MANY_CORRECTED:
        text = f"{count(errors, 'corrected memory error')} of the host since it started"
        yield Check("hardware", Level.WARNING, f"{text}. {where}")
    if checks := found["machine_checks"]:
        text = f"{count(checks, 'machine check')} in the kernel's log. Look at dmesg there"
        yield Check("hardware", Level.WARNING, text)


def _judge_gpus(gpus: Iterable[Mapping[str, Any]]) -> Iterable[Check]:
    for gpu in gpus:
        name = f"GPU {gpu['index']}"
        if gpu["repair_failed"]:
            text = f"{name}: its memory cannot be repaired any more. Have it replaced"
            yield Check("gpu hardware", Level.FAILED, text)
        if gpu["repair_pending"]:
            text = f"{name}: a part of its memory is broken, and is repaired when it is reset"
            yield Check("gpu hardware", Level.WARNING, f"{text}. {_RESET}")
        if gpu["corrected"] >= MANY_CORRECTED:
            text = f"{name}: {count(gpu['corrected'], 'corrected memory error')}"
            yield Check("gpu hardware", Level.WARNING, f"{text}. {_RESET}")
        if 0 < gpu["width"] < gpu["most_width"]:
            text = (
                f"{name}: {gpu['width']} PCIe lanes of {gpu['most_width']}. Seat it anew, or look "
                "at its slot and riser"
            )
            yield Check("gpu hardware", Level.WARNING, text)
        if gpu["held_down_by"]:
            text = (
                f"{name}: its clocks are held down by {' and '.join(gpu['held_down_by'])}. Look at "
                "its cooling and power (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"
            )
            yield Check("gpu hardware", Level.WARNING, text)


def _judge_xids(xids: Iterable[tuple[str, int]]) -> Iterable[Check]:
    seen = Counter((bus, xid) for bus, xid in xids if xid in _XIDS)
    for (bus, xid), times in seen.items():
        often = f" {times} times" if times > 1 else ""
        text = f"GPU at {bus}: Xid {xid} ({_XIDS[xid]}){often} since the host started. {_RESET}"
        yield Check("gpu hardware", Level.WARNING, text)
