"""Every engine keeps the contract of journals."""

import pytest

from rpcwheel.journal import open_journal_backend
from rpcwheel.testing import JOURNAL_CHECKS


@pytest.mark.parametrize("check", JOURNAL_CHECKS.values(), ids=JOURNAL_CHECKS)
def test_sqlite(check, tmp_path):
    check(lambda: open_journal_backend(f"sqlite://{tmp_path}/journal.db"))
