"""The leader knows how late metrics are, whatever the clock of their host says."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_elastic.leader.agents.connection import Incoming
from hvd_elastic.run_events import Metrics
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import encode
from tests.unit.wire.wire_samples import agent_hello


@pytest.mark.parametrize("clock_ahead_s", [-3000.0, 0.0, 3000.0])
def test_metrics_of_a_time_without_a_leader_are_late(
    monkeypatch: pytest.MonkeyPatch, clock_ahead_s: float
) -> None:
    process: Any = SimpleNamespace(host=SimpleNamespace(name="a"))
    incoming = Incoming(process, SimpleNamespace())  # type: ignore[arg-type]
    for check in ("_check_version", "_check_network", "_check_spool"):
        monkeypatch.setattr(incoming, check, lambda _: None)

    def late_s(age_s: float) -> Any:
        sent = time.time() + clock_ahead_s - age_s
        said = Metrics(1, 0, 0, 8, 1, values={"loss": 0.5}, t=sent)
        (message,) = incoming.messages(encode(msg.WorkerSaid("w", said)))
        assert isinstance(message, msg.WorkerSaid)
        assert isinstance(message.message, Metrics)
        return message.message.late_s

    list(incoming.messages(encode(agent_hello(time=time.time() + clock_ahead_s))))
    assert [late_s(age) for age in (44.0, 20.0)] == pytest.approx([44.0, 20.0], abs=0.5)
    assert late_s(0.0) == 0
