"""The file that ``hvd-elastic report-bug`` writes."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from hvd_elastic.cli.app import main
from hvd_elastic.cli.machine import doctor, report_bug
from hvd_elastic.cli.machine.report_bug import without_secrets
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.secret_digests import digests_of


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('["train.py", "--api-key", "hunter22"]', '["train.py", "--api-key", "[removed]"]'),
        ("--wandb-token hunter22 --lr 0.1", "--wandb-token [removed] --lr 0.1"),
        ("AWS_SECRET_ACCESS_KEY=hunter22", "AWS_SECRET_ACCESS_KEY=[removed]"),
        ('{"password": "hunter22", "x": 1}', '{"password": "[removed]", "x": 1}'),
        (r'["-c", "{\"api_key\": \"hunter22\"}"]', r'["-c", "{\"api_key\": \"[removed]"}"]'),
        ("Authorization: Bearer hunter22", "Authorization: Bearer [removed]"),
        ("{'Authorization': 'Basic aHVudGVy'}", "{'Authorization': 'Basic [removed]'}"),
        (
            "GET https://me:hunter22@store/x?token=hunter22",
            "GET https://[removed]@store/x?token=[removed]",
        ),
        ("in the environment: swordfish", "in the environment: [removed]"),
        ("hf_abcdefghijklmnopqrst", "[removed]"),
        ("KeyError: 'momentum'", "KeyError: 'momentum'"),
        ("host keys: 3 accepted, 12345678 tokens", "host keys: 3 accepted, 12345678 tokens"),
    ],
)
def test_secrets_are_removed_and_nothing_else(text: str, left: str) -> None:
    assert without_secrets(text, {"swordfish"})[0] == left


def test_a_report_has_versions_events_and_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    findings = [doctor.Finding("gpu", doctor.Health.GOOD, "2")]
    diagnose = Mock(return_value=findings)
    monkeypatch.setattr(report_bug, "diagnose", diagnose)
    folder = RunFolder.create("digits-1", {"command": ["python", "x.py", "--token=hunter22"]})
    folder.events.write_text('{"kind": "run_started"}\n')
    folder.log_path("node1", 0).write_bytes(b"line\n" * 1000 + b"with swordfish: the end \xff\n")
    digests_of({"MY_TOKEN": "swordfish"}, b"salt").write(folder.secrets)
    assert "swordfish" not in folder.secrets.read_text()
    out = tmp_path / "bug.txt"
    for status in (0, 1):
        with pytest.raises(SystemExit, match=str(status)):
            main(["report-bug", "--out", str(out)])
    said = capsys.readouterr()
    diagnose.assert_called_once_with(imports=False)  # nor where the file exists already
    assert "about run digits-1; 2 values removed" in said.out
    assert f"{out} exists" in said.err
    found = out.read_text()
    assert not {"hunter22", "swordfish"} & {*found.replace(":", " ").replace('"', " ").split()}
    for part in ("hvd-elastic 0.1", "gpu  2", '"kind": "run_started"', "the end \\xff"):
        assert part in found
    assert found.count("line\n") == 199


def test_a_package_that_was_removed_but_for_a_file_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "horovod-0.28.1.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(report_bug, "diagnose", lambda **_: [])
    monkeypatch.setattr(report_bug, "render", lambda _: "all is well")
    assert "all is well" in "".join(report_bug._parts(None))


@pytest.mark.parametrize("error", [KeyError, OSError])
def test_a_user_without_an_account_can_report_a_bug(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """As in a container; the error depends on the version of Python."""
    monkeypatch.setattr("getpass.getuser", Mock(side_effect=error))
    assert without_secrets("token=abcdef1234 of user 1234", ())[0] == "token=[removed] of user 1234"
