"""What becomes of hosts that die while their network is measured; all others are played."""

from __future__ import annotations

from unittest.mock import Mock

from hvd_elastic.hosts.hostfile import parse_hosts
from hvd_elastic.tools.check.network import NetworkProbe, _Node


def test_a_host_that_dies_while_its_clock_is_read_is_left_out_of_the_rest() -> None:
    probe = object.__new__(NetworkProbe)
    probe._nodes, probe.failures = {}, {}
    for host in parse_hosts("a\nb\nc", "text").hosts:
        process = Mock()
        if host.name == "b":
            process.stdin.write = Mock(side_effect=EOFError("it has ended"))
        process.stdout.readline = Mock(return_value=b'{"clock": 0.0}')
        probe._nodes[host.name] = _Node(host, Mock(), process)
    assert probe.clocks().keys() == {"a", "c"}
    assert probe.names == ("a", "c")
    assert "host b: its network cannot be measured: it has ended" in probe.failures["b"]
