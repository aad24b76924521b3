"""A control group with little memory, in which the kernel kills who wants more."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hvd_elastic.programs.usable import GROUPS, PROC, control_groups

SMALL_BYTES = 256 << 20
_VERSIONS = (
    (GROUPS / "memory", {"memory.limit_in_bytes": SMALL_BYTES}),
    (GROUPS, {"memory.max": SMALL_BYTES, "memory.swap.max": 0}),
)


@contextlib.contextmanager
def small_group() -> Iterator[Path]:
    """Make one, and remove it when its processes have ended; skip the test where none can be.

    Where kills are counted for the whole machine alone, agents of other tests would hear of them.
    """
    if not any(
        (folder / name).exists()
        for folder, _ in control_groups("memory", PROC, GROUPS)
        for name in ("memory.events", "memory.oom_control")
    ):
        pytest.skip("this process is in no control group of memory")
    for folder, limits in _VERSIONS:
        group = folder / f"hvd-test-{secrets.token_hex(4)}"
        try:
            if folder == GROUPS:
                (folder / "cgroup.subtree_control").write_text("+memory")
            group.mkdir()
        except OSError:
            continue
        try:
            for name, limit in limits.items():
                with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                    (group / name).write_text(str(limit))
            yield group
        finally:
            _remove(group)
        return
    pytest.skip("no control group of memory can be made here")


def inside(group: Path, command: Sequence[str]) -> list[str]:
    """Return a command that runs another one in the group."""
    enter = f"echo $$ > {shlex.quote(str(group / 'cgroup.procs'))} && exec "
    return ["sh", "-c", enter + shlex.join(command)]


def _remove(group: Path) -> None:
    """The kernel releases a group shortly after its last process has ended."""
    for _ in range(500):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.02)
    group.rmdir()
