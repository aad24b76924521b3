"""What the policy is after, as users say it: mistakes are told before anything is begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.cli.app import main

POLICY = ("--policy", "goodput", "--objective", "cost")


@pytest.mark.parametrize(
    ("hosts", "options", "words"),
    [
        ("a slots=2\nb slots=2 price=1", ("--budget", "4/h"), "no price= for host a; add it"),
        (
            "a slots=2 price=3\nb slots=2 price=2.5",
            ("--budget", "2/h"),
            "--budget 2/h cannot be met: the cheapest host costs 2.5 per hour at the least.",
        ),
        (
            "a slots=2 price=3\nb slots=2 price=2.5",
            ("--budget", "4/h", "--min-np", "3"),
            "3 slots (--min-np) cost 5.5 per hour at the least",
        ),
        (
            "a slots=2 price=9\nb slots=2 price=2.5",
            ("--budget", "4/h", "--pin-hosts", "a"),
            "host a (--pin-hosts) cost 9 per hour at the least",
        ),
        ("a price=1", ("--budget", "cheap"), "a price for an hour such as 40/h, not 'cheap'"),
        ("a price=1", ("--deadline", "6h"), "--deadline and --target-examples belong together"),
        (
            "a slots=2 price=3\nb slots=2 price=2.5",
            ("--budget", "4/h", "--np", "3", "--min-np", "2"),
            "3 slots (--np) cost 5.5 per hour at the least",
        ),
        ("a price=1", ("--min-speedup-per-slot", "0.5"), "belongs to --objective efficiency"),
        ("a price=1", (), "--objective cost needs a --budget, or a --deadline"),
        ("a price=1\nb price=1", ("--budget", "4", "--min-np", "2", "--max-np", "1"), "is above"),
    ],
)
def test_what_cannot_be_is_said_at_the_start(
    hosts: str, options: tuple[str, ...], words: str, tmp_path: Path, capsys: Any
) -> None:
    assert words in refused((*POLICY, *options), hosts, tmp_path, capsys)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--objective", "fast"), "--objective 'fast' is not known; valid: goodput, efficiency"),
        (("--budget", "4/h"), "--budget belongs to --objective cost; add that"),
        (("--deadline", "6h"), "--deadline belongs to --objective cost; add that"),
        (
            ("--objective", "efficiency", "--min-speedup-per-slot", "1.5"),
            "--min-speedup-per-slot 1.5 is above 1",
        ),
        (("--pin-hosts", "a[1"), "--pin-hosts: host list 'a[1', at 'a[1': unbalanced bracket"),
        (("--pin-hosts", ""), "--pin-hosts: host list '' names no host"),
        (("--preemption-command", " "), "--preemption-command is empty"),
    ],
)
def test_mistakes_are_named_as_the_options_are(
    options: tuple[str, ...], words: str, tmp_path: Path, capsys: Any
) -> None:
    assert words in refused(("--policy", "goodput", *options), "a slots=2", tmp_path, capsys)


def refused(options: tuple[str, ...], hosts: str, tmp_path: Path, capsys: Any) -> str:
    """What ``hvd-elastic run`` says to options that are wrong usage."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text(hosts + "\n")
    with pytest.raises(SystemExit) as end:
        main(("run", "--hostfile", str(hostfile), *options, "--", "python", "train.py"))
    assert end.value.code == 2
    return " ".join(capsys.readouterr().err.split())
