"""Whatever happens to a cluster, in whatever order: the rules hold, and the run goes on."""

from __future__ import annotations

from hypothesis import given, note, settings
from hypothesis import strategies as st

from hvd_elastic.control.state_machine import MachineConfig, Phase
from tests.paths import ALL
from tests.unit.control.simulated_cluster import SimulatedCluster

COMMON = ["deliver", "command", "move", "round"] * 4 + ["agent", "agent", "time", "time"]
FAULTS = ["crash", "crash", "break", "freeze", "crash_host", "boot", "hosts", "target"]
FAULTS += ["drain", "drain", "return", "save"]

actions = st.lists(
    st.tuples(st.sampled_from([*COMMON, *FAULTS, "spoil"]), st.integers(0, 11), st.integers(0, 15)),
    max_size=120,
)
clusters = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(
    lambda sizes: dict(zip("abcd", sizes, strict=False))
)


@st.composite
def configurations(draw: st.DrawFn, slots: int) -> MachineConfig:
    min_np = draw(st.integers(1, min(3, slots)))
    max_np = draw(st.none() | st.integers(min_np, slots))
    # Faults are invented faster than any run gives up on them, so that it has to go on.
    return MachineConfig(min_np, max_np, max_worker_failures=50, max_stuck_generations=1000)


@settings(max_examples=300 if ALL else 80, deadline=None)
@given(st.data(), clusters, actions, st.booleans())
def test_a_run_that_is_left_alone_comes_to_its_desired_size(data, hosts, script, notices):
    config = data.draw(configurations(sum(hosts.values())))
    cluster = SimulatedCluster(hosts, config, notices)
    for action in script:
        cluster.do(*action)
    cluster.settle()
    note(f"{cluster.machine.phase} {cluster.machine.members}")
    if cluster.referee.over is not None:
        # Only a run that has nothing left may give up: every slot it needs is known to be bad.
        assert "spoil" in {kind for kind, _, _ in script}
        assert cluster.referee.over.status == "failed"
        return
    wanted = min(config.max_np or sum(hosts.values()), sum(hosts.values()))
    assert cluster.machine.phase is Phase.RUNNING
    assert len(cluster.machine.members) == wanted
    assert cluster.machine.deadline() is None


@settings(max_examples=300 if ALL else 80, deadline=None)
@given(st.data(), clusters, actions, st.booleans(), st.integers(0, 80))
def test_a_run_whose_training_ends_finishes_once(data, hosts, script, notices, ends_at):
    config = data.draw(configurations(sum(hosts.values())))
    cluster = SimulatedCluster(hosts, config, notices)
    for number, action in enumerate(script):
        if number == ends_at:
            cluster.do("finish", 0, 0)
        cluster.do(*action)
    cluster.settle()
    if cluster.referee.over is None:
        cluster.do("finish", 0, 0)
        cluster.settle()
    assert cluster.referee.over is not None, cluster.machine.phase
