"""Fixtures of the unit tests of kits."""

import pytest

from fixtures.worlds import world  # noqa: F401 - a fixture


@pytest.fixture
def file(tmp_path):
    """Write a settings file and give its path."""

    def write(text, name="shop.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
