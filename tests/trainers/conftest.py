"""Virtual hosts for the tests of trainers; see ``make test-trainers``."""

from __future__ import annotations

from tests.dist.conftest import stage, start_job, style

__all__ = ["stage", "start_job", "style"]

# Training scripts of the tests: run by workers, not to be imported for their doctests.
collect_ignore = ["scripts"]
