"""What ``checkclust`` is told of a host's folders."""

from __future__ import annotations

from pathlib import Path

from hvd_elastic.programs.look_at_host import look_at_folder
from tests import other_user
from tests.other_user import open_folder as open_folder


@other_user.needs_root
def test_a_folder_below_one_that_may_not_be_entered_is_refused(open_folder: Path) -> None:
    (open_folder / "secret").mkdir(mode=0o700)

    def look_as_nobody() -> None:
        found = look_at_folder(str(open_folder / "secret" / "data"))
        assert found["refused"] == "Permission denied"

    other_user.call(look_as_nobody)
