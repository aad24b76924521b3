"""The provider of the user's own programs: what they read, print, and refuse."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_elastic.engines.cloud.command import CommandProvider
from hvd_elastic.engines.cloud.lease import user_data
from hvd_elastic.engines.cloud.provider import (
    CapacityError,
    CloudError,
    CredentialsError,
    Offer,
    Order,
    QuotaError,
    ThrottledError,
    UnsupportedError,
)
from hvd_elastic.errors import UsageError

TAGS = {"cloud": "lab", "owner": "me@here", "token": "t1"}
ORDER = Order(Offer("small", "a", price=0.3), 2, "t1", TAGS, "#!/bin/sh\n", 60.0)
Programs = Callable[..., CommandProvider]


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    """Return a provider of shell scripts; those that are not given print nothing."""

    def make(**scripts: str) -> CommandProvider:
        for name in {"start", "list", "stop", *scripts}:
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\ncat > {tmp_path}/{name}.json\n{scripts.get(name, '')}\n")
            path.chmod(0o755)
        return CommandProvider({"programs": str(tmp_path)})

    return make


def printing(value: object) -> str:
    return f"cat <<'END'\n{json.dumps(value)}\nEND"


def test_a_program_reads_the_order_and_prints_its_machines(programs, tmp_path) -> None:
    machine = {"id": "m1", "state": "starting", "tags": TAGS}
    (started,) = programs(start=printing({"machines": [machine]})).start(ORDER)
    assert (started.id, started.state, started.tags) == ("m1", "starting", TAGS)
    asked = json.loads((tmp_path / "start.json").read_text())
    assert asked["type"] == "small"
    assert asked["count"] == 2
    assert asked["token"] == "t1"
    assert asked["tags"] == TAGS
    assert asked["user_data"] == "#!/bin/sh\n"


def test_machines_without_the_tags_that_were_asked_for_are_not_ours(programs) -> None:
    others = [{"id": "m2", "state": "running"}, {"id": "m3", "state": "running", "tags": {"a": ""}}]
    ours = {"id": "m1", "state": "running", "tags": TAGS}
    provider = programs(list=printing({"machines": [*others, ours]}))
    assert [each.id for each in provider.list({"cloud": "lab"})] == ["m1"]
    assert [each.id for each in provider.list({})] == ["m1"]


def test_without_a_program_for_offers_there_is_one_for_each_type_and_zone(programs) -> None:
    found = programs().offers(["small"], ["a", "b"], True)
    assert [(each.zone, each.spot, each.price) for each in found] == [
        ("a", True, None),
        ("a", False, None),
        ("b", True, None),
        ("b", False, None),
    ]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("capacity", CapacityError),
        ("quota", QuotaError),
        ("throttled", ThrottledError),
        ("credentials", CredentialsError),
        ("unsupported", UnsupportedError),
        ("other", CloudError),
        ("nonsense", CloudError),
    ],
)
def test_a_refusal_keeps_its_kind_and_words(programs, kind, error) -> None:
    script = printing({"error": kind, "message": "the words"}) + "\nexit 1"
    with pytest.raises(error, match="the words") as raised:
        programs(start=script).start(ORDER)
    assert type(raised.value) is error


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no such flavour >&2; exit 3", "no such flavour"),
        ("exit 3", "exit status 3"),
        ("echo '<html>'", "printed '<html>"),
        (printing({"machines": [{"id": "m1", "state": "asleep"}]}), "asleep"),
        (printing({"machines": [{"state": "running"}]}), "id"),
    ],
)
def test_what_is_no_answer_is_shown_and_leaves_open_what_was_started(
    programs, script, words
) -> None:
    with pytest.raises(CloudError, match=words) as raised:
        programs(start=script).start(ORDER)
    assert type(raised.value) is CloudError


def test_missing_programs_are_named(tmp_path: Path) -> None:
    (tmp_path / "start").write_text("#!/bin/sh\n")
    with pytest.raises(UsageError, match="no executable start and no list and no stop"):
        CommandProvider({"programs": str(tmp_path)})
    with pytest.raises(UsageError, match="--programs FOLDER"):
        CommandProvider({})


def test_user_data_is_a_script_for_any_user_and_key() -> None:
    key = "ssh-ed25519 AAAA it's; mine $(touch /tmp/x)"
    script = user_data(3600.0, 1200.0, "ubuntu", key)
    checked = subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    assert len(script) < 16384  # the limit of EC2
    line = next(line for line in script.splitlines() if "authorized_keys" in line)
    words = line.strip().partition(" >> ")[0]
    printed = subprocess.run(["sh", "-c", words], text=True, capture_output=True).stdout
    assert printed == f"{key}\n"
