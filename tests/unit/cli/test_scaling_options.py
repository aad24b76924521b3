"""What the policy is after, as users say it: mistakes are told before anything is begun."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.cli.app import main
from hvd_elastic.cli.scaling_options import cheapest
from hvd_elastic.policy.snapshot import HostOffer

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
        ("a price=1", ("--deadline", "6h"), "a deadline and a target in useful examples belong"),
        ("a price=1", (), "needs a budget or a deadline"),
        ("a price=1\nb price=1", ("--budget", "4", "--min-np", "2", "--max-np", "1"), "is above"),
    ],
)
def test_what_cannot_be_is_said_at_the_start(
    hosts: str, options: tuple[str, ...], words: str, tmp_path: Path, capsys: Any
) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(hosts + "\n")
    command = ("run", "--hostfile", str(hostfile), *POLICY, *options, "--", "python", "train.py")
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=6),
    st.integers(0, 12),
)
def test_the_cheapest_hosts_are_found(rows: list[tuple[int, int]], slots: int) -> None:
    hosts = [HostOffer(f"n{i}", s, float(price)) for i, (s, price) in enumerate(rows)]
    tried = [
        sum(host.price or 0.0 for host in some)
        for number in range(len(hosts) + 1)
        for some in itertools.combinations(hosts, number)
        if sum(host.slots for host in some) >= slots
    ]
    assert cheapest(hosts, slots) == min(tried, default=math.inf)
