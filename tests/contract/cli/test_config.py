"""`rpcwheel config`: problems of a settings file, and the settings that are in effect."""

import json

import pytest

from rpcwheel.cli import main

SETTINGS = """
timeout = 2.0
retry = { retry_on = ["UNAVAILABLE"], backoff = { initial = 0.1, max = 2.0 } }

[methods."/shop.*/*"]
timeout = { message_timeout = 1.0 }

[methods."/shop.Orders/*"]
idempotent = true

[methods."/shop.Orders/Get"]
idempotent = false

[methods."/shop.Audit/*"]
failback = { retry_on = ["UNAVAILABLE"] }
"""


@pytest.fixture
def file(tmp_path):
    """A settings file; the tests may write it again."""
    path = tmp_path / "shop.toml"
    path.write_text(SETTINGS)
    return path


@pytest.fixture
def checked(file, capsys):
    """Runs `config check --json`, and returns the settings with their sources."""

    def run(*arguments):
        assert main(["config", "check", str(file), "--json", *arguments]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["valid"] is True
        return {name: (one["value"], one["from"]) for name, one in report["settings"].items()}

    return run


def test_check_prints_every_problem_with_the_nearest_name(file, capsys) -> None:
    file.write_text('timeot = 2\n[retry]\nretry_on = ["UNAVAILBLE"]\nmax_attempts = 0\n')
    assert main(["config", "check", str(file)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"{file}: ") for line in lines)
    for text in ("did you mean 'timeout'?", "UNAVAILABLE", "max_attempts"):
        assert any(text in line for line in lines)


def test_check_of_a_file_that_cannot_be_read_ends_with_1(tmp_path, capsys) -> None:
    assert main(["config", "check", str(tmp_path / "none.toml")]) == 1
    assert "none.toml: it can't be read" in capsys.readouterr().err


def test_check_as_json_lists_the_problems(file, capsys) -> None:
    file.write_text("timeot = 2\nretri = 3\n")
    assert main(["config", "check", str(file), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["valid"], len(report["problems"])) == (False, 2)


def test_check_prints_settings_with_defaults(file, capsys) -> None:
    assert main(["config", "check", str(file)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["SETTING", "VALUE", "FROM"]
    assert ["timeout.timeout", "2.0", "file"] in lines
    assert ["retry.max_attempts", "3", "default"] in lines
    assert ["heartbeat", "false", "default"] in lines
    assert ['methods."/shop.Orders/*".idempotent', "true", "file"] in lines
    assert lines[-1] == [str(file), "is", "valid."]


def test_check_of_a_method_names_the_pattern_of_each_setting(checked) -> None:
    found = checked("--method", "/shop.Orders/Get")
    assert found["timeout.timeout"] == (2.0, "file")
    assert found["timeout.message_timeout"] == (1.0, "/shop.*/*")
    assert found["timeout.propagate_deadline"] == (True, "default")
    assert found["idempotent"] == (False, "/shop.Orders/Get")
    assert found["retry.retry_on"] == (["UNAVAILABLE"], "file")
    assert found["hedging"] == (False, "default")
    assert found["retry.backoff"][0].startswith("wait_random_exponential(")


def test_check_of_a_method_names_the_pattern_that_replaces_a_policy(checked) -> None:
    found = checked("--method", "/shop.Audit/Push")
    assert found["retry"] == (False, "/shop.Audit/*")
    assert found["failback.retry_on"] == (["UNAVAILABLE"], "/shop.Audit/*")
    assert found["failback.max_pending"] == (100, "default")


@pytest.mark.parametrize("method", ["shop.Orders/Get", "/shop.Orders", "/shop.Orders/"])
def test_check_wants_a_method_in_full(file, capsys, method) -> None:
    assert main(["config", "check", str(file), "--method", method]) == 2
    assert "give a method in full, such as /shop.Orders/Get" in capsys.readouterr().err


def test_schema_prints_the_json_schema_of_a_settings_file(capsys) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"timeout", "retry", "methods"} <= schema["properties"].keys()
