"""`rpcwheel config`: problems of a settings file, and the settings that are in effect."""

import json
import os
import sys
import tomllib

import pytest

from rpcwheel import ConfigurationError, Kit, aio
from rpcwheel.cli import main
from rpcwheel.kit.config import policy_from_file

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

RETRY = 'retry = { retry_on = ["UNAVAILABLE"] }\n'
NONE_IDEMPOTENT = "because no method has idempotent = true"


@pytest.fixture
def file(tmp_path):
    """A settings file; the tests may write it again."""
    path = tmp_path / "shop.toml"
    path.write_text(SETTINGS)
    return path


@pytest.fixture
def checked(file, capsys):
    """Runs `config check --json`, and returns value, source and note of each setting."""

    def run(*arguments):
        assert main(["config", "check", str(file), "--json", *arguments]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["valid"] is True
        return {name: tuple(one.values()) for name, one in report["settings"].items()}

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
    assert main(["config", "check", str(file), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["valid"], len(report["problems"])) == (False, 3)


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("path", ["", "/x.toml"])
def test_check_refuses_a_url_without_its_password(capsys, path, options) -> None:
    assert main(["config", "check", f"redis://shop:secret@cache:6379{path}", *options]) == 1
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert f"redis://***@cache:6379{path}: give the path of a settings file" in shown
    assert "secret" not in shown


def test_check_refuses_what_a_kit_refuses(file, capsys) -> None:
    file.write_text(
        '[methods."/a/*".failback]\n'
        'retry_on = ["UNAVAILABLE"]\njournal = "sqlite:///x.db?durabilty=power"\nname = "x"\n'
        '[methods."/b/*".failback]\n'
        'retry_on = ["UNAVAILABLE"]\njournal = "sqlite:///"\nname = "x"\n'
    )
    assert main(["config", "check", str(file)]) == 1
    first, second = (f'{file}: methods["/{name}/*"].failback' for name in "ab")
    expected = (
        (f"{first}.journal: sqlite:///x.db: ", "did you mean 'durability'?"),
        (f"{second}.journal: sqlite:///: ", "give the file"),
        (f"{second}: two failback policies have the name 'x'", "give each its own"),
    )
    lines = capsys.readouterr().err.splitlines()
    for line, (beginning, part) in zip(lines, expected, strict=True):
        assert line.startswith(beginning)
        assert part in line
    for kit in (Kit, aio.Kit):
        with pytest.raises(ConfigurationError, match="durabilty") as refused:
            kit.from_file(file)
        assert len(refused.value.problems) == 3


@pytest.mark.parametrize(
    ("package", "name", "text"),
    [
        ("redis", "a.toml", 'failback = { retry_on = "UNAVAILABLE", journal = "redis://a" }'),
        ("ruamel.yaml", "a.yaml", "timeout: 2"),
    ],
)
def test_check_says_which_package_to_install_and_ends_with_2(
    tmp_path, capsys, monkeypatch, package, name, text
) -> None:
    monkeypatch.delitem(sys.modules, "rpcwheel.journal.redis", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_text(text)
    assert main(["config", "check", str(tmp_path / name), "--json"]) == 2
    captured = capsys.readouterr()
    extra = {"redis": "redis", "ruamel.yaml": "config"}[package]
    assert (captured.out, f"pip install 'rpcwheel[{extra}]'" in captured.err) == ("", True)


def test_check_prints_settings_with_defaults(file, capsys) -> None:
    assert main(["config", "check", str(file)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["SETTING", "VALUE", "FROM"]
    assert ["timeout.timeout", "2.0", "file"] in lines
    assert ["retry.max_attempts", "3", "default"] in lines
    assert ["retry.attempt_timeout", "none", "default"] in lines
    assert ["heartbeat", "none", "default"] in lines
    assert ['methods."/shop.Orders/*".idempotent', "true", "file"] in lines
    assert lines[-1] == [str(file), "is", "valid."]


def test_check_of_a_method_names_the_pattern_of_each_setting(checked) -> None:
    found = checked("--method", "/shop.Orders/Get")
    assert found["timeout.timeout"] == (2.0, "file")
    assert found["timeout.message_timeout"] == (1.0, "/shop.*/*")
    assert found["timeout.propagate_deadline"] == (True, "default")
    assert found["idempotent"] == (False, "/shop.Orders/Get")
    assert found["retry.retry_on"][:2] == (["UNAVAILABLE"], "file")
    assert found["hedging"] == (None, "default")
    assert found["retry.backoff"][:2] == ({"initial": 0.1, "max": 2.0}, "file")


def test_check_of_a_method_names_the_pattern_that_replaces_or_removes_a_policy(
    file, checked
) -> None:
    found = checked("--method", "/shop.Audit/Push")
    assert found["retry"] == (None, "/shop.Audit/*", "replaced by failback")
    assert found["hedging"] == (None, "default")
    assert found["failback.retry_on"] == (["UNAVAILABLE"], "/shop.Audit/*")
    assert found["failback.max_pending"] == (100, "default")
    with file.open("a") as more:
        more.write('[methods."/shop.*/P*"]\nretry = false')
    assert checked("--method", "/shop.Audit/Push")["retry"] == (None, "/shop.*/P*")


def test_check_of_a_method_says_that_a_limit_beyond_the_timeout_has_no_effect(
    file, checked
) -> None:
    file.write_text(
        'timeout = { timeout = 9, message_timeout = 5 }\n[methods."/shop.Orders/*"]\ntimeout = 1'
    )
    found = checked("--method", "/shop.Orders/Get")
    assert found["timeout.timeout"] == (1.0, "/shop.Orders/*")
    assert found["timeout.message_timeout"] == (
        None,
        "file",
        "no effect: not shorter than timeout",
    )


def test_check_says_that_a_method_that_is_not_idempotent_is_not_retried(
    file, checked, capsys
) -> None:
    note = "only for calls that a server refuses: the method is not idempotent"
    assert checked("--method", "/shop.Orders/Get")["retry.max_attempts"] == (3, "default", note)
    assert checked("--method", "/shop.Orders/Put")["retry.max_attempts"] == (3, "default")
    assert main(["config", "check", str(file), "--method", "/shop.Orders/Get"]) == 0
    assert f"default ({note})" in capsys.readouterr().out
    file.write_text("hedging = 0.1")
    note = "no effect: the method is not idempotent"
    assert checked("--method", "/shop.Orders/Get")["hedging.delay"] == (0.1, "file", note)


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        ("timeout = 2", []),
        (f"{RETRY}[methods.'/a/*']\nidempotent = true", []),
        (f"idempotent = true\n{RETRY}", []),
        (RETRY, [f"retry: only for calls that a server refuses, {NONE_IDEMPOTENT}"]),
        ("[methods.'/a/*']\nhedging = 0.1", [f"hedging: no effect, {NONE_IDEMPOTENT}"]),
    ],
)
def test_check_notes_that_no_method_is_idempotent(file, capsys, text, notes) -> None:
    file.write_text(text)
    assert main(["config", "check", str(file)]) == 0
    _, _, summary = capsys.readouterr().out.rpartition("\n\n")
    assert summary.splitlines() == [*(f"note: {note}" for note in notes), f"{file} is valid."]
    assert main(["config", "check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == notes


def test_check_prints_a_criticality_by_its_name(file, checked, capsys) -> None:
    file.write_text("criticality = 'Sheddable-Plus'")
    found = checked("--method", "/shop.Orders/Get")["criticality"]
    assert found == ("sheddable_plus", "file")
    assert main(["config", "check", str(file)]) == 0
    assert '"sheddable_plus"' in capsys.readouterr().out


def test_check_prints_of_the_limit_of_a_method_only_the_number(file, checked) -> None:
    file.write_text("limit = { max_wait = 0.5 }\n[methods.'/shop.Audit/*']\nlimit = 3")
    note = "in addition to the limit of the server"
    found = checked("--method", "/shop.Audit/Push")
    limits = {name: value for name, value in found.items() if name.startswith("limit")}
    assert limits == {"limit.max_concurrent": (3, "/shop.Audit/*", note)}
    found = checked("--method", "/shop.Orders/Get")
    assert found["limit.max_concurrent"] == ("adaptive", "default")
    assert found["limit.max_wait"] == (0.5, "file")


def test_check_prints_of_the_limit_of_a_method_also_its_rate(file, checked) -> None:
    file.write_text("[methods.'/shop.Audit/*']\nlimit = { rate = 3 }")
    found = checked("--method", "/shop.Audit/Push")
    ((rate, place),) = (value for name, value in found.items() if name.startswith("limit"))
    assert (rate["rate"], place) == (3.0, "/shop.Audit/*")


def test_check_prints_values_as_a_toml_file_has_them(file, capsys) -> None:
    file.write_text("""
retry.retry_on = ["INTERNAL", "UNAVAILABLE"]
retry.backoff = { initial = 0.05, max = 3, multiplier = 1.5, jitter = 0 }
retry.retry_budget = { max_tokens = 10, token_ratio = 0.1 }
failback.retry_on = "UNAVAILABLE"
failback.default = { "a b" = [{ day = "\\u00e9" }], "\\u007f" = "\\u007f", empty = {}, most = inf, \
at = [2026-01-02, 2026-01-02T03:04:05Z, 2026-01-02 03:04:05.25, 03:04:05] }
""")
    assert main(["config", "check", str(file)]) == 0
    lines = [line.split(None, 1) for line in capsys.readouterr().out.splitlines() if "." in line]
    printed = {name: rest.rsplit("  ", 1)[0] for name, rest in lines if rest.endswith("file")}
    assert (
        printed["retry.backoff"].strip()
        == "{initial = 0.05, max = 3.0, multiplier = 1.5, jitter = 0.0}"
    )
    pasted = "\n".join(f"{name} = {value}" for name, value in printed.items())
    again = file.with_name("again.toml")
    again.write_text(pasted)
    default = tomllib.loads(pasted)["failback"]["default"]
    assert default == tomllib.loads(file.read_text())["failback"]["default"]
    assert policy_from_file(file) == policy_from_file(again)


def test_check_prints_as_a_string_in_json_what_json_does_not_have(file, checked) -> None:
    file.write_text(
        'failback.retry_on = "UNAVAILABLE"\n'
        "failback.default = [inf, { a = nan, b = 0.5 }, 2026-01-02]"
    )
    default = ["inf", {"a": "nan", "b": 0.5}, "2026-01-02"]
    assert checked()["failback.default"] == (default, "file")


def test_check_prints_no_password_of_a_journal_and_a_target(file, checked) -> None:
    file.write_text(
        "[failback]\n"
        'retry_on = "UNKNOWN"\n'
        'journal = "redis://shop:a b@10.0.0.7?db=2"\n'
        'target = "etcd://shop:x@10.0.0.7/shop.Orders"\n'
        'default = "ask https://shop.example/?mail=ops@shop.example"'
    )
    settings = checked()
    assert settings["failback.journal"] == ("redis://***@10.0.0.7?db=2", "file")
    assert settings["failback.target"] == ("etcd://***@10.0.0.7/shop.Orders", "file")
    default = "ask https://shop.example/?mail=ops@shop.example"
    assert settings["failback.default"] == (default, "file")


@pytest.fixture
def environ(monkeypatch):
    """Sets variables; others of rpcwheel are removed."""
    for name in [name for name in os.environ if name.startswith("RPCWHEEL_")]:
        monkeypatch.delenv(name)
    return monkeypatch.setenv


def test_check_env_lets_variables_override_the_file(checked, environ) -> None:
    environ("RPCWHEEL_CONFIG", "other.toml")
    environ("RPCWHEEL_RETRY__MAX_ATTEMPTS", "7")
    found = checked("--env")
    assert found["retry.max_attempts"] == (7, "file or variable")
    assert found["retry.retry_on"] == (["UNAVAILABLE"], "file or variable")
    assert found["retry.min_retries"] == (10, "default")
    assert found['methods."/shop.Orders/*".idempotent'] == (True, "file or variable")


def test_check_env_without_a_file_checks_the_variables(file, capsys, environ) -> None:
    environ("RPCWHEEL_TIMEOUT", "3")
    assert main(["config", "check", "--env"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["timeout.timeout", "3.0", "variable"] in lines
    environ("SHOP_RPC_CONFIG", str(file))
    environ("SHOP_RPC_TIMEOT", "3")
    assert main(["config", "check", "--prefix", "SHOP_RPC_"]) == 1
    assert "did you mean SHOP_RPC_TIMEOUT?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.toml"], "none.toml: it can't be read"),
        ([], "give a FILE, or --env"),
        (["--prefix", "shop"], "prefix must be in capital letters"),
        *(
            (["FILE", "--method", method], "give a method in full, such as /shop.Orders/Get")
            for method in ("shop.Orders/Get", "/shop.Orders", "/shop.Orders/")
        ),
    ],
)
def test_check_refuses_wrong_arguments_with_2(file, capsys, arguments, message) -> None:
    given = [str(file) if one == "FILE" else one for one in arguments]
    assert main(["config", "check", *given]) == 2
    assert message in capsys.readouterr().err


def test_schema_prints_the_json_schema_of_a_settings_file(capsys) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"timeout", "retry", "methods"} <= schema["properties"].keys()
