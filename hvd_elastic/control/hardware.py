"""Judge what a host knows of faults of its GPUs and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from hvd_elastic.formatting import count
from hvd_elastic.run_events import Fault

MANY_CORRECTED = 1000
"""Corrected memory errors since the last reset from which a module is likely to fail."""
MANY_NEW = 100
"""The same of errors that came between two looks."""
MANY_CHECKS = 10
"""Corrected machine checks from which a part is likely to fail; a few are normal."""
_RESET = "Reset it (nvidia-smi -r), or have it replaced if that does not help"
_MODULES = "Move its memory modules, or have them replaced (edac-util -v names them)"
_XIDS = {
    48: "uncorrected memory error",
    54: "its power cable is not connected",
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
    136: "NVLink cannot be trained",
    140: "uncorrected memory error",
    143: "cannot be initialized",
    155: "NVLink error",
    156: "a part of it is retired",
    158: "does not answer",
    **dict.fromkeys(range(144, 151), "NVLink error"),
}
"""Xid events that tell of a broken GPU; most others are faults of programs."""
_NVLINK = range(144, 151)
"""Xid events of NVLink, whose text says whether they are fatal."""
_MILD = (63, 92, 94)
"""Xid events after which a GPU can continue."""


def judge_hardware(
    found: Mapping[str, Any], before: Mapping[str, Any] | None = None
) -> list[Fault]:
    """Return the faults of the hardware of a host.

    Args:
        found: answer of ``programs/hardware.py``.
        before: an earlier answer; what has come since is more serious.
    """
    before = before or found
    faults = [*_judge_memory(found, before)]
    gpus, earlier = found["gpus"], {gpu["bus"]: gpu for gpu in before["gpus"]}
    lanes = Counter[tuple[str, int]]()
    for gpu in gpus:
        model = gpu["name"], gpu["most_width"]
        lanes[model] = max(lanes[model], gpu["width"])
    for gpu in gpus:
        others = lanes[gpu["name"], gpu["most_width"]]
        faults += _judge_gpu(gpu, earlier.get(gpu["bus"], gpu), others)
    names = {_short(gpu["bus"]): f"GPU {gpu['index']}" for gpu in gpus}
    faults += _judge_xids(found["xids"] or (), before["xids"] or (), names)
    return faults


def _judge_memory(found: Mapping[str, Any], before: Mapping[str, Any]) -> Iterable[Fault]:
    if errors := found["memory_uncorrected"]:
        text = f"{count(errors, 'uncorrected memory error')} of the host since it started"
        yield Fault("memory uncorrected", f"{text}. {_MODULES}", errors, is_broken=True)
    errors = found["memory_corrected"] or 0
    new = errors - (before["memory_corrected"] or 0)
    if errors >= MANY_CORRECTED or new >= MANY_NEW:
        since = f"{new} of them in the last hour" if new >= MANY_NEW else "since it started"
        text = f"{count(errors, 'corrected memory error')} of the host, {since}"
        yield Fault("memory corrected", f"{text}. {_MODULES}", errors)
    if checks := found["machine_checks_uncorrected"]:
        is_new = checks > (before["machine_checks_uncorrected"] or 0)
        text = f"{count(checks, 'uncorrected machine check')} in the kernel's log"
        yield Fault("machine checks", f"{text}. Look at dmesg there", checks, is_broken=is_new)
    elif (checks := found["machine_checks"] or 0) >= MANY_CHECKS:
        text = f"{count(checks, 'machine check')} in the kernel's log. Look at dmesg there"
        yield Fault("machine checks", text, checks)


def _judge_gpu(gpu: Mapping[str, Any], before: Mapping[str, Any], others: int) -> Iterable[Fault]:
    """Judge a GPU; ``others``: the most PCIe lanes that one of its kind has on this host."""
    name = f"GPU {gpu['index']}"
    if gpu.get("lost"):
        text = f"{name} fell off the bus. A reboot may bring it back"
        yield Fault(f"{name} lost", text, is_broken=True)
    if errors := gpu["uncorrected"]:
        text = f"{name}: {count(errors, 'uncorrected memory error')}. {_RESET}"
        yield Fault(f"{name} uncorrected", text, errors, is_broken=True)
    if gpu["repair_failed"]:
        text = f"{name}: its memory cannot be repaired any more. Have it replaced"
        yield Fault(f"{name} repair failed", text, is_broken=True)
    if gpu["repair_pending"]:
        text = f"{name}: a part of its memory is broken, and is repaired when it is reset"
        yield Fault(f"{name} repair", f"{text}. {_RESET}")
    errors, new = gpu["corrected"], gpu["corrected"] - before["corrected"]
    if errors >= MANY_CORRECTED or new >= MANY_NEW:
        since = f", {new} of them in the last hour" if new >= MANY_NEW else ""
        text = f"{name}: {count(errors, 'corrected memory error')}{since}. {_RESET}"
        yield Fault(f"{name} corrected", text, errors)
    # Many machines give all their GPUs half of the lanes that they could use.
    if 0 < gpu["width"] < max(others, gpu["most_width"] // 2):
        text = f"{name}: {gpu['width']} PCIe lanes of {gpu['most_width']}"
        text += f", others of its kind have {others}" if gpu["width"] < others else ""
        yield Fault(f"{name} lanes", f"{text}. Look at its slot and riser")
    if gpu["held_down_by"]:
        text = (
            f"{name}: its clocks are held down by {' and '.join(gpu['held_down_by'])}. Look at "
            "its cooling and power (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"
        )
        yield Fault(f"{name} held down", text)
    if gpu["action"]:
        text = f"{name}: its driver asks for: {gpu['action']}"
        yield Fault(f"{name} action", text, is_broken=True)


def _judge_xids(
    xids: Iterable[tuple[str, int, str, int]],
    before: Iterable[tuple[str, int, str, int]],
    names: Mapping[str, str],
) -> Iterable[Fault]:
    old = _broken(before)
    for (bus, xid), times in _broken(xids).items():
        name = names.get(_short(bus), f"GPU at {bus}")
        often = f" {times} times" if times > 1 else ""
        text = f"{name}: Xid {xid} ({_XIDS[xid]}){often} since the host started. {_RESET}"
        is_broken = xid not in _MILD and times > old[bus, xid]
        yield Fault(f"{name} Xid {xid}", text, times, is_broken=is_broken)


def _broken(xids: Iterable[tuple[str, int, str, int]]) -> Counter[tuple[str, int]]:
    """Return how often each Xid event that tells of a broken GPU came, by bus and number."""
    found = Counter[tuple[str, int]]()
    for bus, xid, text, times in xids:
        if xid in _XIDS and (xid not in _NVLINK or " Fatal " in text):
            found[bus, xid] += times
    return found


def _short(bus: str) -> str:
    """Return the place of a GPU on its bus as the kernel's log has it: 0000:18:00."""
    return bus.partition(".")[0][-10:].lower()
