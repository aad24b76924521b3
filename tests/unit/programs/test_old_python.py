"""What is sent to a host can be read by an older Python than the one that this package needs."""

from __future__ import annotations

import ast

from hvd_elastic.hosts.remote_python import _OWN_IMPORT, PROGRAMS, source_of
from tests.unit.test_architecture import modules

STARTED_THERE = {f"{PROGRAMS}.dial_back", f"{PROGRAMS}.secure_stream"}
"""Programs that an engine starts with the interpreter of this package."""


def test_what_is_sent_to_hosts_is_written_for_python_3_7():
    inside = {name for name in modules() if name.startswith(f"{PROGRAMS}.")} - STARTED_THERE
    packages = {f"{PROGRAMS}.copy"}
    left, sent = sorted(inside - packages), set[str]()
    while left:
        name = left.pop()
        text = source_of(name)
        ast.parse(text, name, feature_version=(3, 7))
        sent.add(name)
        left += set(_OWN_IMPORT.findall(text)) - sent
    others = {name for name in sent if not name.startswith(f"{PROGRAMS}.")}
    assert others == {"hvd_elastic.errors", "hvd_elastic.own_files"}
