"""The loop of the leader, which waits once for calls and deadlines."""

from __future__ import annotations

from hvd_elastic.leader.led_run import Loop


def test_a_deadline_does_not_wait_until_no_call_is_left() -> None:
    done: list[str] = []
    now = 0.0

    def call() -> None:
        nonlocal now
        now += 1.0
        done.append("call")
        loop.post(call)  # there is always another one

    def on_deadline() -> None:
        done.append("deadline")
        loop.stop()

    loop = Loop(lambda: 3.0, on_deadline, lambda: now)
    loop.post(call)
    loop.run()
    assert done == ["call"] * 3 + ["deadline"]
