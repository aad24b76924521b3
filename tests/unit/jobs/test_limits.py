"""How many jobs and slots one user may have at a time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.cli.jobs.limits import limit_lines
from hvd_elastic.errors import UsageError
from hvd_elastic.jobs.admission import within_limits
from hvd_elastic.jobs.job import Job, JobRequest, JobStatus
from hvd_elastic.jobs.limits import Limit, Limits, LimitsFile
from hvd_elastic.jobs.shares import ClusterShares
from hvd_elastic.jobs.slot_plan import Candidate, plan_slots
from hvd_elastic.policy.schedule.shares import Shares
from hvd_elastic.policy.snapshot import HostOffer

ADA, BOB = 4001, 4002
HOSTS = [HostOffer("a", 4), HostOffer("b", 4)]


def job(number: int, user: int | None = ADA, held: int = 0, **more: Any) -> Job:
    request = JobRequest("train", {"command": ["x"]}, user=user, **more)
    status = JobStatus.RUNNING if held else JobStatus.QUEUED
    return Job(number, request, f"train-{number}", status, held={"a": held} if held else {})


def admitted(jobs: list[Job], limits: Limits, bound: tuple[Job, ...] = ()) -> dict[int, int | None]:
    """Most slots of each job that may hold some, by number."""
    found, _ = within_limits([Candidate(each) for each in jobs], bound, limits)
    return {each.job.number: each.job.request.max_np for each in found}


def test_a_user_has_as_many_jobs_at_a_time_as_allowed_and_is_told_why_others_wait() -> None:
    jobs = [job(1), job(2, held=1), job(3), job(4, BOB), job(5, priority=2.0)]
    limits = Limits(each=Limit(most_jobs=2))
    assert admitted(jobs, limits).keys() == {2, 5, 4}
    _, held = within_limits([Candidate(each) for each in jobs], (), limits)
    assert held.keys() == {1, 3}
    assert held[1] == "waits: 4001 may have 2 jobs at a time; see: hvd-elastic limits"
    assert admitted([job(1)], limits, bound=(job(2, held=1), job(3, held=1))) == {}
    assert admitted(jobs, Limits(user={"4002": Limit(most_jobs=1)})).keys() == {1, 2, 3, 4, 5}


def test_slots_beyond_the_fewest_are_dealt_out_evenly_to_those_that_can_take_them() -> None:
    limits = Limits(each=Limit(most_slots=6))
    assert admitted([job(1)], limits) == {1: 6}
    assert admitted([job(1), job(2)], limits) == {1: 3, 2: 3}
    assert admitted([job(1, max_np=1), job(2), job(3, max_np=2)], limits) == {1: 1, 3: 2, 2: 3}
    assert admitted([job(1, min_np=4), job(2, min_np=3), job(3)], limits) == {1: 5, 3: 1}
    assert admitted([job(1, min_np=2)], limits, bound=(job(2, held=3),)) == {1: 3}
    assert admitted([job(1, held=4, min_np=4), job(2, held=4, min_np=4)], limits) == {1: 4, 2: 4}


def test_no_plan_gives_a_user_more_slots_than_allowed() -> None:
    jobs = [*(job(n) for n in range(1, 5)), *(job(n, BOB) for n in range(5, 7))]
    found, _ = within_limits(
        [Candidate(each) for each in jobs], (), Limits(each=Limit(most_slots=3))
    )
    plan = plan_slots(found, HOSTS, 10_000.0)
    for user in (ADA, BOB):
        own = [each.number for each in jobs if each.request.user == user]
        assert 1 <= sum(sum(plan.slots.get(n, {}).values()) for n in own) <= 3


def test_limits_of_a_group_and_of_all_hold_beside_those_of_a_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hvd_elastic.jobs.limits._groups_of", lambda uid, _: {f"g{uid}", "both"})
    jobs = [job(1), job(2), job(3, BOB), job(4, BOB)]
    limits = Limits(each=Limit(most_slots=6), group={f"g{ADA}": Limit(most_slots=4)})
    assert admitted(jobs, limits) == {1: 2, 2: 2, 3: 3, 4: 3}
    limits = Limits(all=Limit(most_slots=9), group={f"g{ADA}": Limit(most_slots=4)})
    assert admitted(jobs, limits) == {1: 2, 2: 2, 3: 3, 4: 2}
    limits = Limits(all=Limit(most_jobs=3), group={"both": Limit(most_jobs=1)})
    assert admitted(jobs, limits) == {1: None}
    _, held = within_limits([Candidate(each) for each in jobs], (), limits)
    assert held[4] == "waits: group both may have 1 job at a time; see: hvd-elastic limits"
    limits = Limits(all=Limit(most_slots=3))
    _, held = within_limits([Candidate(each) for each in jobs], (), limits)
    assert held == {
        4: "waits: all users together may have 3 slots at a time; see: hvd-elastic limits"
    }


def test_where_slots_are_shared_users_take_turns_at_a_limit_of_all() -> None:
    shares = Shares()
    shares.weights = {str(ADA): 2.0, str(BOB): 1.0}
    jobs = [*(job(number) for number in range(1, 5)), job(5, BOB), job(6, BOB)]
    limits = Limits(all=Limit(most_jobs=3))

    def starts(*running: Job) -> list[int]:
        found, _ = within_limits(
            [Candidate(each) for each in [*running, *jobs]], (), limits, shares
        )
        return sorted(each.job.number for each in found)

    assert starts() == [1, 2, 5]
    assert starts(job(8, held=1), job(9, held=1)) == [5, 8, 9]


def test_limits_of_a_user_take_the_place_of_those_of_each_one_by_one() -> None:
    limits = Limits(each=Limit(most_slots=8, most_jobs=4), user={str(ADA): Limit(most_slots=16)})
    assert limits.of_user(str(ADA)) == Limit(most_slots=16, most_jobs=4)
    assert limits.of_user(str(BOB)) == limits.each


def test_the_shortest_of_all_times_is_how_long_a_job_may_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hvd_elastic.jobs.limits._groups_of", lambda uid, _: {"vision"})
    hour, day = Limit(longest_time="1h"), Limit(longest_time="1d")
    assert Limits().longest(job(1)) == (math.inf, "")
    assert Limits(all=day).longest(job(1)) == (86400.0, "all users together")
    limits = Limits(all=day, each=day, group={"vision": hour})
    assert limits.longest(job(1)) == (3600.0, "group vision")
    assert limits.longest(job(1, time_limit_s=60.0)) == (60.0, "")


def test_the_weight_of_a_group_is_divided_among_its_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hvd_elastic.jobs.limits._groups_of", lambda uid, _: {f"g{uid // 10}"})
    limits = Limits(
        each=Limit(weight=2.0), group={"g400": Limit(weight=3.0)}, user={"4001": Limit(weight=4.0)}
    )
    assert limits.has_shares
    assert not Limits(each=Limit(most_jobs=2)).has_shares
    assert limits.weights([4001, 4002, 4010]) == {"4001": 2.0, "4002": 1.0, "4010": 2.0}
    assert limits.weights([4002]) == {"4002": 3.0}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[each]\nmost_slots = 0\n", "line 2, each.most_slots: Expected `int` >= 1"),
        ("\n[each]\nmost_gpus = 3\n", "line 3, each.most_gpus: .*unknown field"),
        ("most_slots = 3\n", "line 1, most_slots: most_slots is not known"),
        ("[user]\nroot = 3\n", "line 2, user.root: write"),
        ("each.most_jobs = 1\neach.most_slots = 0\n", "line 2, each.most_slots"),
        ("[each]\n[user.no-such-user]\nmost_jobs = 3\n", "line 2, .*no user 'no-such-user'"),
        ('[group."no-such-group"]\n', "line 1, .*no group 'no-such-group'"),
        ("each = ", "limits in .* Invalid value"),
        ("[each]\nmost_jobs = none\n", "line 2"),
        ("[each]\nmost_jobs = 3\n[each]\n", "line 3"),
        ('half_life = "soon"\n', "line 1, half_life: .* takes a time"),
        ('[all]\nlongest_time = "0h"\n', "line 2, all.longest_time: .* above 0"),
        ("[each]\nweight = 0\n", "line 2, each.weight: Expected `float` >= 0.001"),
        ("[each]\nweight = nan\n", "line 2, each.weight"),
        ("[all]\nweight = 2\n", "line 2, all.weight: .* no others"),
        (
            "[all]\nmost_slots = 4\n[user.root]\nmost_jobs = 9\nmost_slots = 5\n",
            r"line 5, user.root.most_slots: it is more than that of \[all\] in line 2",
        ),
        (
            '[user.root]\nlongest_time = "2h"\n[group.root]\nlongest_time = "1h"\n',
            r"line 2, user.root.longest_time: .* of \[group.root\] in line 4, so it is never",
        ),
        ("[each]\nmost_jobs = 5\n[all]\nmost_jobs = 4\n", r"line 2, each.most_jobs: .* \[all\]"),
    ],
)
def test_limits_that_make_no_sense_are_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=told) as caught:
        Limits.read(path)
    assert str(path) in str(caught.value)


def test_limits_of_a_file_and_a_broken_save(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    warnings: list[str] = []
    file = LimitsFile(path, warnings.append)
    assert file.limits == Limits()
    path.write_text(
        'half_life = "2h"\n[each]\nmost_jobs = 4\nlongest_time = "90m"\n'
        "[user.root]\nmost_slots = 8\nweight = 2\n[group.root]\nweight = 0.5\n"
    )
    assert not file.changed(0.0), "somebody may still be writing it"
    assert file.limits == Limits()
    assert "was saved a moment ago" in file.problem
    assert file.changed(1.0)
    assert file.limits.half_life_s == 7200.0
    assert file.limits.of_user("root") == Limit(2.0, 8, 4, "90m")
    assert file.limits.group == {"root": Limit(weight=0.5)}
    path.write_text("[each]\nmost_jobs = none\n")
    assert not file.changed(2.0)
    assert file.changed(3.0)
    assert file.limits.each.most_jobs == 4
    assert "line 2" in warnings[0]
    assert warnings == [file.problem]
    assert file.problem.endswith("; the earlier ones stay")
    path.unlink()
    assert not file.changed(4.0)
    assert file.changed(5.0)
    assert not file.problem
    assert not file.changed(6.0)
    assert file.limits == Limits()


def test_limits_hold_while_their_file_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("[each]\nmost_jobs = 1\n")
    warnings: list[str] = []
    file = LimitsFile(path, warnings.append)

    def most() -> int | None:
        return file.limits.each.most_jobs

    path.write_text("")  # as `>` and many editors begin
    assert not file.changed(10.0)
    path.write_text("[each]\n")
    assert not file.changed(10.9)
    path.unlink()  # as editors that rename
    assert not file.changed(11.8)
    assert most() == 1
    path.write_text("[each]\nmost_jobs = 20\n")
    # At once if the file system gave it another inode, as to a file that is renamed.
    assert file.changed(12.7) or file.changed(13.7)
    assert most() == 20
    path.write_text(
        "[each]\nmost_jobs = 3\n# unchanged since a while, and written while it is read\n"
    )
    assert not file.changed(20.0)

    def read_a_part(path: Path) -> Limits:
        path.write_text("")
        return Limits()

    with monkeypatch.context() as patch:
        patch.setattr(Limits, "read", read_a_part)
        assert not file.changed(30.0)
    assert most() == 20
    path.write_text("[each]\nmost_jobs = 3\n")
    assert not file.changed(31.0)
    assert file.changed(32.0)
    assert most() == 3
    assert not file.problem
    assert not warnings


def test_limits_and_shares_are_printed_with_what_is_used_now(tmp_path: Path) -> None:
    limits = Limits(
        each=Limit(most_jobs=4, longest_time="8h"),
        user={str(ADA): Limit(weight=2.0)},
        group={"vision": Limit(most_slots=6)},
    )
    warnings: list[str] = []
    shares = ClusterShares(tmp_path / "shares.json", warnings.append)
    jobs = [job(1, held=3), job(2, BOB, held=1), job(3, BOB)]
    assert shares.weigh(limits, jobs) is not None
    for now in (1000.0, 1100.0):
        shares.count_use(jobs, now)
    expected = """\
USER          WEIGHT  FAIR  USED  JOBS  AT MOST  SLOTS  AT MOST  TIME AT MOST
4001               2  75 %  75 %     1        4      3        -      8 h 00 m
4002               1  25 %  25 %     1        4      1        -      8 h 00 m
each other         1                          4               -      8 h 00 m
group vision                         0        -      0        6             -
all                                  2        -      4        -             -
"""
    assert "\n".join(limit_lines(shares.rows(limits, jobs))) + "\n" == expected
    again = ClusterShares(tmp_path / "shares.json", warnings.append)
    assert limit_lines(again.rows(limits, jobs))[1] == expected.splitlines()[1]
    assert again.weigh(Limits(), jobs) is None
    expected = """\
USER        JOBS  AT MOST  SLOTS  AT MOST
4001           1        -      3        -
4002           1        -      1        -
each other              -               -
all            2        -      4        -
"""
    assert "\n".join(limit_lines(again.rows(Limits(), jobs))) + "\n" == expected
    assert not warnings
    (tmp_path / "shares.json").write_text("{")
    ClusterShares(tmp_path / "shares.json", warnings.append)
    assert warnings[0].startswith("what users had of the slots begins anew: ")
