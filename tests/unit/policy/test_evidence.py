"""What is made of metrics events, sensible and not."""

from __future__ import annotations

import math

import pytest

from hvd_elastic.policy.evidence import CoreSharing, Evidence
from tests.unit.records.made_events import noted


def told(evidence: Evidence, step_s: float, since: float, windows: int, batch: int = 32) -> float:
    """Metrics of so many windows of 2 s; when they end."""
    step, now = since / step_s, since
    for _ in range(windows + 1):
        fields = {"step": step, "examples": step * batch, "size": evidence.allocation.slots}
        noted(evidence, "metrics", fields, now)
        step, now = step + 2 / step_s, now + 2
    return now


def test_step_times_come_from_steps_and_time():
    evidence = Evidence()
    evidence.formed(["a", "a", "b"])
    told(evidence, 0.1, 0.0, 8)
    model = evidence.model()
    assert model is not None
    assert float(model.step_s(2, 3, 32 / 3, 0)) == pytest.approx(0.1, rel=0.05)
    assert evidence.limits is not None
    assert evidence.limits.initial_batch_size == evidence.limits.max_batch_size == 32
    assert evidence.noise == math.inf, "a fixed batch needs no noise scale"
    assert evidence.done == pytest.approx(8 * 2 / 0.1 * 32)


def test_epochs_that_are_shorter_than_a_window_are_timed_by_their_examples():
    evidence = Evidence()
    evidence.formed(["one"])
    for seen in range(8):  # two epochs of five steps of 8 examples and one of 4 in each 2.2 s
        progress = {"step": 12 * seen, "examples": 88 * seen, "size": 1}
        noted(evidence, "metrics", progress, 2.2 * seen)
    model = evidence.model()
    assert model is not None
    assert float(model.step_s(1, 1, 8, 0)) == pytest.approx(0.2, rel=0.05)


def test_steps_and_clocks_that_go_back_are_no_measurement():
    evidence = Evidence()
    evidence.formed(["a"])
    end = told(evidence, 0.1, 100.0, 5)
    before = evidence.measured
    noted(evidence, "metrics", {"step": 3, "examples": 96}, end)
    noted(evidence, "metrics", {"step": 4, "examples": 128}, end - 50)
    assert evidence.measured == before


def test_metrics_of_another_size_are_not_of_this_world():
    evidence = Evidence()
    evidence.formed(["a", "b"])
    noted(evidence, "metrics", {"step": 0, "examples": 0, "size": 1}, 0.0)
    noted(evidence, "metrics", {"step": 50, "examples": 1600, "size": 1}, 5.0)
    assert evidence.model() is None


def test_a_lasting_change_of_step_time_makes_the_old_times_worthless():
    evidence = Evidence()
    evidence.formed(["a", "b"])
    end = told(evidence, 0.1, 0.0, 8)
    assert not evidence.news
    told(evidence, 0.3, end, 5)
    assert evidence.news
    model = evidence.model()
    assert model is not None
    assert float(model.step_s(2, 2, 16, 0)) == pytest.approx(0.3, rel=0.1)


def test_old_times_across_hosts_are_believed_less_once_hosts_come_or_go():
    evidence = Evidence()
    evidence.formed(["a", "b"])
    end = told(evidence, 0.3, 0.0, 8)
    evidence.formed(["a"])
    end = told(evidence, 0.2, end, 8)

    def doubt(hosts: int) -> float:
        model = evidence.model()
        assert model is not None
        assert float(model.step_s(1, 1, 32, 0)) == pytest.approx(0.2, rel=0.05)
        return float(model.predict(hosts, hosts, 32 / hosts, 0).uncertainty)

    evidence.timings.distrust_old(end)
    apart, alone = doubt(2), doubt(1)
    evidence.timings.distrust_old(end + 3600)
    assert doubt(2) > 3 * apart
    assert doubt(1) < 1.5 * alone
    evidence.formed(["a", "b"])
    told(evidence, 0.25, end + 3600, 8)
    assert doubt(2) < 2 * apart, "timed anew"


def test_old_times_that_new_ones_contradict_are_forgotten():
    for new_s, kept in ((0.45, True), (0.1, False)):
        evidence = Evidence()
        evidence.formed(["a", "b", "c"])
        end = told(evidence, 0.5, 0.0, 8)  # over a slow link
        evidence.formed(["a"])
        end = told(evidence, 0.2, end, 8)
        evidence.timings.distrust_old(end + 3600)
        evidence.model()
        evidence.formed(["a", "b"])
        told(evidence, new_s, end + 3600, 8)
        evidence.model()
        assert ((3, 3) in evidence.timings.worlds) is kept
        assert (1, 1) in evidence.timings.worlds


def test_a_batch_that_adapts_waits_for_its_noise_scale():
    evidence = Evidence()
    plan = {"global_batch_size": 64, "accumulation_steps": 0}
    limits = {"initial_batch_size": 64, "max_batch_size": 512, "max_atomic_batch_size": None}
    noted(evidence, "batch_plan", {**plan, "limits": limits}, 0.0)
    assert evidence.limits is not None
    assert evidence.limits.max_batch_size == 512
    assert math.isnan(evidence.noise), "an adaptive batch waits for its noise scale"


def test_a_noise_scale_that_is_no_longer_finite_is_forgotten():
    evidence = Evidence()
    evidence.formed(["a"])
    plan = {"global_batch_size": 64, "accumulation_steps": 0}
    limits = {"initial_batch_size": 64, "max_batch_size": 512, "max_atomic_batch_size": None}
    noted(evidence, "batch_plan", {**plan, "limits": limits}, 0.0)
    found = []
    for second in range(0, 80, 2):
        fields = {"step": second * 10, "examples": second * 640, "size": 1}
        scale = {"noise_scale": 100.0} if second < 10 else {}
        noted(evidence, "metrics", fields | scale, float(second))
        found.append(evidence.noise)
    assert found[:20] == [100.0] * 20
    assert found[-1] == math.inf, "each example counts since a noise scale is not finite"


def test_what_is_trained_again_after_a_checkpoint_counts_once():
    evidence = Evidence()
    for life in range(3):
        evidence.formed(["a"])
        for number in range(11):
            fields = {"step": 10 * number, "examples": 640 * number, "size": 1}
            noted(evidence, "metrics", fields, 100.0 * life + 2 * number)
    assert evidence.done == pytest.approx(6400)


def test_pauses_are_those_that_were_seen():
    evidence = Evidence()
    for pause_s in (None, 0.2, 9.0, 0.3):
        noted(evidence, "rescale_finished", {"pause_s": pause_s}, 0.0)
    assert evidence.pause_s == 0.3


def test_own_times_with_unequal_shares_tell_the_same_speeds():
    for shares, own_s in [(None, [0.1, 0.3]), ([16, 16], [0.1, 0.3]), ([24, 8], [0.15, 0.15])]:
        evidence = Evidence()
        evidence.formed(["a", "b"])
        for number in range(6):
            told_s = [own_s[0], own_s[1] + 1e-6 * number]
            fields = {"step": 1, "examples": 1, "rank_s": told_s}
            noted(
                evidence, "metrics", fields if shares is None else {**fields, "shares": shares}, 1.0
            )
        assert evidence.speeds.unequal is (shares is not None)
        assert evidence.speeds.slowness("b") == pytest.approx(3.0, rel=0.01)


def test_a_change_of_shares_shows_what_is_constant_in_a_pass_and_speeds_stay_the_same():
    evidence = Evidence()
    evidence.formed(["a", "b"])
    plan = {"global_batch_size": 32, "accumulation_steps": 0}
    noted(evidence, "batch_plan", {**plan, "limits": {}}, 0.0)
    for shares in ([16, 16], [24, 8]):
        for number in range(6):
            # 10 examples take as long as what is constant; b is three times as slow.
            own_s = [0.01 * (10 + shares[0]), 0.03 * (10 + shares[1]) + 1e-6 * number]
            fields = {"step": 1, "examples": 1, "rank_s": own_s, "shares": shares}
            noted(evidence, "metrics", fields, 1.0)
        assert evidence.speeds.slowness("b") == pytest.approx(3.0, rel=0.02)
    assert evidence.speeds.fixed.examples == pytest.approx(10.0, rel=0.1)
    assert evidence.speeds.steps_slowness(evidence.plan) == pytest.approx(
        3 * (10 + 8) / (10 + 16), abs=0.1
    )


@pytest.mark.parametrize(("shares", "at_first"), [([16, 16], 0), (None, 1)])
def test_while_ranks_are_about_to_share_out_the_batch_nothing_is_timed(shares, at_first):
    evidence = Evidence()
    evidence.formed(["a", "b"])
    for number in range(16):
        step = 10.0 * number
        fields = {"step": step, "examples": 32 * step, "rank_s": [0.1, 0.3 + 1e-6 * number]}
        told_shares = {} if shares is None else {"shares": shares}
        noted(evidence, "metrics", {**fields, **told_shares}, 2.0 * number)
        if number == 2:
            assert evidence.measured == at_first
    assert evidence.measured > 0, "not for ever: shares may not help"


@pytest.mark.parametrize(
    "fields",
    [
        {"noise_scale": float("nan")},
        {"noise_scale": -3.0},
        {"rank_s": [float("nan"), -1.0]},
        {"rank_s": [0.0, None]},
        {"rank_s": []},
        {"rank_s": [5e-324, 5e-324]},
        {"shares": [-1, 16]},
        {"size": 9},
    ],
)
def test_nonsense_beside_good_steps_changes_nothing_known(fields):
    evidence = Evidence()
    evidence.formed(["a", "b"])
    end = told(evidence, 0.1, 0.0, 5)
    noted(evidence, "metrics", {"step": 1e4, "examples": 32e4, **fields}, end)
    assert not evidence.noise_scale < 0
    assert evidence.speeds.slowness("a") == evidence.speeds.slowness("b") == 1.0
    assert evidence.speeds.fixed.examples == 0.0
    assert evidence.model() is not None


def test_steps_in_two_passes_are_no_measurement_of_steps_in_one():
    """One rank alone makes two passes of some steps, to see the noise of the gradients."""
    limits = {"initial_batch_size": 64, "max_batch_size": 512}
    constant_s, example_s = 0.04, 0.004
    evidence = Evidence()
    evidence.formed(["a"])
    plan = {"global_batch_size": 64, "accumulation_steps": 0, "limits": limits}
    noted(evidence, "batch_plan", plan, 0.0)
    now, step, passes = 0.0, 0.0, 0.0
    for passes_a_step, windows in ((2.0, 6), (1.125, 6)):
        for _ in range(windows):
            made = 2 / (passes_a_step * constant_s + 64 * example_s)
            now, step, passes = now + 2, step + made, passes + made * passes_a_step
            told = {"step": step, "examples": 64 * step, "passes": passes, "size": 1}
            noted(evidence, "metrics", told, now)
    model = evidence.model()
    assert model is not None
    assert model.alpha_c == pytest.approx(constant_s, rel=0.3)
    assert float(model.step_s(1, 1, 64, 0)) == pytest.approx(constant_s + 64 * example_s, rel=0.05)


def test_own_times_tell_what_of_a_step_is_the_reduction():
    limits = {"initial_batch_size": 64, "max_batch_size": 512}
    constant_s, example_s, reduction_s = 0.04, 0.004, 0.06
    evidence = Evidence()
    now, step, step_s = 0.0, 0.0, 0.0
    for hosts in (["a"], ["a", "a", "b", "b", "c", "c", "d", "d"]):
        evidence.formed(hosts)
        batch = 64 if len(hosts) == 1 else 128
        plan = {"global_batch_size": batch, "accumulation_steps": 0, "limits": limits}
        noted(evidence, "batch_plan", plan, now)
        own_s = constant_s + example_s * batch / len(hosts)
        step_s = own_s + (reduction_s if len(hosts) > 1 else 0.0)
        for window in range(8):
            now, step = now + 2, step + 2 / step_s
            told = {"step": step, "examples": batch * step, "size": len(hosts)}
            rank_s = [own_s + 1e-6 * window] * len(hosts)
            noted(evidence, "metrics", {**told, "rank_s": rank_s}, now)
    model = evidence.model()
    assert model is not None
    for batch in (16, 64):
        true_s = constant_s + example_s * batch
        assert float(model.step_s(1, 1, batch, 0)) == pytest.approx(true_s, rel=0.1)
    assert float(model.step_s(4, 8, 16, 0)) == pytest.approx(step_s, rel=0.05)
    assert evidence.timings.worlds == {(1, 1), (4, 8)}, "own times are of no world"
    assert float(model.predict(2, 4, 16, 0).uncertainty) > 0.1, "what four cost was not seen"


def test_a_change_of_shares_begins_another_measurement():
    evidence = Evidence()
    evidence.formed(["a", "b"])

    def note(now: float, step: int, shares: object) -> None:
        fields = {"step": step, "examples": 32 * step, "shares": shares}
        noted(evidence, "metrics", fields, now)

    for number in range(8):
        note(2.0 * number, 20 * number, [16, 16])
    before = evidence.measured
    assert before > 3
    note(16.0, 160, [24, 8])
    note(18.0, 200, [24, 8])
    assert evidence.measured == before, "steps of before and of settling"
    note(20.0, 240, [24, 8])
    assert evidence.measured == before + 1
    for nonsense in ([0, 32], [16], [], None):
        note(20.0, 240, nonsense)
    note(22.0, 280, [24, 8])
    assert evidence.measured == before + 2


def test_machines_of_any_size_are_compared_by_their_ranks_per_core():
    cores = CoreSharing()
    cores.add_host("small", "one", 2)
    cores.add_host("large", "other", 8)
    cores.note_timed([("small", 4), ("large", 8)])
    assert not cores.why_unknown([("large", 16)])
    assert cores.why_unknown([("small", 3), ("large", 17)]) == (
        "17 ranks would share 8 cores of one machine, and at most 4 ranks on 2 cores were timed"
    )
