"""Whether an account's login shell runs commands."""

from __future__ import annotations

import pwd

import pytest

from hvd_elastic.hosts.account import command_shell, how_to_mend_shell, why_no_commands


def account(shell: str) -> pwd.struct_passwd:
    return pwd.struct_passwd(("ann", "x", 1000, 1000, "", "/home/ann", shell))


@pytest.mark.parametrize("shell", ["/bin/sh", ""])
def test_a_shell_runs_commands(shell: str) -> None:
    assert why_no_commands(account(shell)) is None
    assert command_shell(account(shell)) == "/bin/sh"


@pytest.mark.parametrize("shell", ["/usr/sbin/nologin", "/bin/false", "/no/such/shell"])
def test_what_runs_nothing_is_named_and_not_used_here(shell: str) -> None:
    why = why_no_commands(account(shell))
    assert why is not None
    assert why.startswith(f"user ann has the login shell {shell}")
    assert command_shell(account(shell)) == "/bin/sh"
    assert how_to_mend_shell(account(shell)).endswith(" ann")
