"""Temporary files of workers."""

from __future__ import annotations

from pathlib import Path

from hvd_elastic.agent.scratch import make_scratch, scratch_variables


def test_what_a_killed_agent_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path)}
    left = make_scratch("run", "a", environment)
    (left / "pymp-1").mkdir()
    others = [make_scratch("run", "b", environment), make_scratch("other", "a", environment)]
    new = make_scratch("run", "a", environment)
    assert new.parent == tmp_path
    assert sorted(tmp_path.iterdir()) == sorted([*others, new])


def test_a_folder_that_is_not_on_this_host_is_not_used(tmp_path: Path) -> None:
    made = make_scratch("run", "a", {"TMPDIR": str(tmp_path / "missing")})
    made.rmdir()
    assert not (tmp_path / "missing").exists()


def test_names_are_short_however_long_the_run_id_is(tmp_path: Path) -> None:
    made = make_scratch("r" * 200, "h" * 200, {"TMPDIR": str(tmp_path)})
    assert len(made.name) < 30


def test_compiled_code_is_kept_for_later_workers(tmp_path: Path) -> None:
    made = make_scratch("run", "a", {"TMPDIR": str(tmp_path)})
    variables = scratch_variables(made)
    assert variables["TMPDIR"] == str(made)
    assert Path(variables["TORCHINDUCTOR_CACHE_DIR"]).parent == tmp_path
