"""What the machine must have, and how it is asked for."""

from __future__ import annotations

from hvd_elastic.install.prerequisites import (
    PREREQUISITES,
    Prerequisite,
    Purpose,
    apt_command,
    find_program,
    missing,
)


def absent(name: str, *apt: str) -> Prerequisite:
    return Prerequisite(name, lambda: None, apt, Purpose.BUILD)


def test_missing_keeps_the_order_and_leaves_out_what_is_there():
    there = Prerequisite("b", lambda: "/bin/b", ("b",), Purpose.BUILD)
    items = [absent("c", "c"), there, absent("a", "a")]
    assert [item.name for item in missing(items)] == ["c", "a"]


def test_each_package_is_named_once():
    lacking = [absent("ip", "iproute2"), absent("tc", "iproute2"), absent("x", "y", "z")]
    assert apt_command(lacking, sudo=False) == "apt-get install -y iproute2 y z"


def test_daemons_are_found_without_sbin_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program("no-such-program", "sh") == "/usr/bin/sh"
    assert find_program("no-such-program") is None


def test_every_prerequisite_says_what_brings_it():
    for item in PREREQUISITES:
        assert item.apt
        assert item.purpose.value
