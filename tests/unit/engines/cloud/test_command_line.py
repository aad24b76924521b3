"""The options of ``hvd-elastic cloud``: what is refused before a cloud is asked, and how."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvd_elastic.cli.app import app
from hvd_elastic.cli.engines.cloud import UpOptions
from hvd_elastic.engines.cloud.records import CloudFolder, owner
from hvd_elastic.errors import RunError, UsageError

VALID = {
    "provider_name": "command",
    "programs": Path("/programs"),
    "types": "small,large",
    "instances": "2-8",
    "max_hours": 12.0,
}


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"types": None}, "--type"),
        ({"instances": None}, "--instances"),
        ({"instances": "8-2"}, "Did you mean --instances 2-8"),
        ({"instances": "0"}, "at least 1 instance"),
        ({"max_hours": None}, "--max-hours 12"),
        ({"max_hours": 0.001}, "less than 30 s"),
        ({"budget": "much"}, "--budget takes a price"),
        ({"budget": "-1"}, "--budget takes a price"),
        ({"addresses": "both"}, "public or private"),
        ({"public_key": Path("/no/such.pub")}, "--public-key"),
        ({"ssh_config": Path("/no/such")}, "--ssh-config"),
    ],
)
def test_wrong_options_are_refused_with_what_is_valid(change, words) -> None:
    with pytest.raises(UsageError, match=words):
        UpOptions(**{**VALID, **change}).definition("lab")


@pytest.mark.parametrize("name", ["", "Lab", "../lab", "a b", "x" * 40])
def test_what_cannot_be_a_name_is_refused(name) -> None:
    with pytest.raises(UsageError, match="cannot name a cloud"):
        UpOptions(**VALID).definition(name)  # type: ignore[arg-type]


def test_a_private_key_in_place_of_a_public_one_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "id"
    key.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END\n")
    with pytest.raises(UsageError, match="not one line with a public key"):
        UpOptions(**VALID, public_key=key).definition("lab")  # type: ignore[arg-type]


def test_a_definition_is_read_as_it_was_written() -> None:
    definition = UpOptions(**VALID, budget="40/h", spot=True).definition("lab")  # type: ignore[arg-type]
    folder = CloudFolder("lab")
    folder.write(definition)
    assert CloudFolder.open("lab").read() == definition
    assert (definition.least, definition.most, definition.budget) == (2, 8, 40.0)


def test_a_cloud_that_is_not_known_is_named_with_those_that_are() -> None:
    CloudFolder("lab").write(UpOptions(**VALID).definition("lab"))  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"no cloud is named lap \(clouds here: lab\)"):
        CloudFolder.open("lap")


@pytest.fixture
def programs(tmp_path: Path) -> list[str]:
    """Options of programs of the user, which know of one machine."""
    folder = tmp_path / "programs"
    folder.mkdir()
    machine = {"id": "m1", "state": "running", "tags": {"cloud": "lab", "owner": owner()}}
    for name in ("start", "list", "stop"):
        path = folder / name
        path.write_text(f"#!/bin/sh\necho '{json.dumps({'machines': [machine]})}'\n")
        path.chmod(0o755)
    return ["--provider", "command", "--programs", str(folder)]


def test_machines_are_found_although_a_definition_cannot_be_read(programs) -> None:
    folder = CloudFolder("lab")
    folder.write(UpOptions(**VALID).definition("lab"))  # type: ignore[arg-type]
    (folder.path / "cloud.json").write_text("{")
    done = CliRunner().invoke(app, ["cloud", "list", "--all", "--json", *programs])
    assert [row["id"] for row in json.loads(done.stdout)] == ["m1"]
    assert "cloud.json cannot be read" in str(done.exception)


@pytest.mark.parametrize("words", [["list", "--all"], ["down", "--expired"]])
def test_nothing_is_said_to_run_where_nobody_was_asked(words) -> None:
    done = CliRunner().invoke(app, ["cloud", *words])
    assert done.stdout == ""
    assert "no provider was asked" in str(done.exception)


def test_a_provider_that_fails_does_not_hide_the_machines_of_others(programs) -> None:
    settings = {"programs": "/nowhere"}
    gone = replace(UpOptions(**VALID).definition("lab"), settings=settings)  # type: ignore[arg-type]
    CloudFolder("lab").write(gone)
    done = CliRunner().invoke(app, ["cloud", "list", "--all", "--json", *programs])
    assert [row["id"] for row in json.loads(done.stdout)] == ["m1"]
    assert "command /nowhere: " in str(done.exception)
    assert CliRunner().invoke(app, ["cloud", "list", "--all"]).stdout == ""  # not: 0 machines


def test_a_price_that_is_not_known_is_not_shown_as_none(programs) -> None:
    done = CliRunner().invoke(app, ["cloud", "list", "--all", *programs])
    end = f"1 machine (1 of {owner()}), 0.00 an hour and machines whose price is not known\n"
    assert done.stdout.endswith(end)


def test_a_plan_that_the_budget_cuts_short_says_so(programs) -> None:
    more = ("--type", "large", "--instances", "1", "--max-hours", "1", "--budget", "1/h")
    done = CliRunner().invoke(app, ["cloud", "up", "lab", *more, "--dry-run", *programs])
    assert "0 machines of at least 1 would be started within --budget 1 an" in str(done.exception)


def test_a_cloud_that_a_run_uses_keeps_its_definition(programs) -> None:
    folder = CloudFolder("lab")
    settings = {"programs": programs[-1]}
    made = replace(UpOptions(**VALID).definition("lab"), settings=settings)  # type: ignore[arg-type]
    folder.write(made)
    more = ("--type", "large", "--instances", "9", "--max-hours", "1", "--no-start")
    with folder.use("run r1"):
        done = CliRunner().invoke(app, ["cloud", "up", "lab", *more, *programs])
    assert "used by run r1" in str(done.exception)
    assert folder.read() == made


def test_one_user_at_a_time_has_a_cloud() -> None:
    folder = CloudFolder("lab")
    folder.write(UpOptions(**VALID).definition("lab"))  # type: ignore[arg-type]
    with folder.use("run r1"):
        with pytest.raises(RunError, match="used by run r1"):
            folder.use("run r2")
    folder.use("run r2").close()


def test_the_owner_stays_when_the_computer_gets_another_name(monkeypatch) -> None:
    first = owner()
    monkeypatch.setattr("socket.gethostname", lambda: "renamed")
    assert owner() == first
