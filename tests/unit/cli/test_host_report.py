"""What the cluster tools say of hosts, whatever the moment of Ctrl-C."""

from __future__ import annotations

import io
import json
import sys

import pytest
import typer

from hvd_elastic.cli.cluster.host_options import HereOptions
from hvd_elastic.cli.cluster.host_report import Printer, finish
from hvd_elastic.hosts.fanout import HostResult, Outcome
from hvd_elastic.hosts.hostfile import Host


class _CtrlCAfterLine(io.StringIO):
    """Ctrl-C the moment that a line is out, as whoever reads it may send it."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line

    def flush(self) -> None:
        super().flush()
        if self.getvalue().count("\n") == self.line:
            self.line = 0
            raise KeyboardInterrupt


@pytest.mark.parametrize("line", [1, 2, 3])
def test_a_host_whose_line_is_out_counts_as_ended(
    monkeypatch: pytest.MonkeyPatch, line: int
) -> None:
    hosts = [Host(f"node{n}") for n in range(1, 5)]
    out = _CtrlCAfterLine(line)
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(typer.Exit) as ended:
        finish(
            HereOptions(as_json=True).over(hosts),
            (HostResult(host, Outcome.OK, 0.1) for host in hosts),
            Printer(hosts),
            lambda result: {},
        )
    assert ended.value.exit_code == 130
    shown = [json.loads(text) for text in out.getvalue().splitlines()]
    assert [entry["kind"] for entry in shown] == ["host"] * line + ["summary"]
    assert shown[-1]["states"] == {"ok": line, "interrupted": 4 - line}


def test_what_hosts_send_is_shown_as_text_except_the_output_of_ones_own_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    host = Host("node1")
    printer = Printer([host])
    printer.lines(host, "stdout", "a \x1b]0;OWNED\x07 command line")
    printer.print_note("an error \x1b[2J of a host")
    printer.lines(host, "stdout", "\x1b[32mgreen\x1b[0m", raw=True)
    assert capsys.readouterr() == (
        "node1: a \\u001b]0;OWNED\\u0007 command line\nnode1: \x1b[32mgreen\x1b[0m\n",
        "an error \\u001b[2J of a host\n",
    )
