"""Opening a journal whose package cannot be imported."""

import pytest

from rpcwheel.errors import ExtraMissing
from rpcwheel.journal import open_journal_backend


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'psycopg'", name="psycopg"), "No module .*'psycopg'"),
        (ImportError("no pq wrapper available.\nAttempts made:\n-"), "no pq wrapper available."),
    ],
    ids=["missing", "without libpq"],
)
def test_a_package_that_cannot_be_imported_is_an_error_with_its_reason(monkeypatch, error, reason):
    def import_module(name):
        raise error

    monkeypatch.setattr("rpcwheel.journal.opening.import_module", import_module)
    install = r"pip install 'rpcwheel\[postgresql\]'"
    with pytest.raises(ExtraMissing, match=rf"imported \({reason}\): {install}$"):
        open_journal_backend("postgresql://h/db")
