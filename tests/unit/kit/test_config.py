"""The settings of a kit, from a file and from the environment: the same, and as well checked."""

import sys
from functools import partial

import pytest
import tenacity

from fixtures.refusals import not_refused_so
from rpcwheel.call import DefaultResponsePolicy, MethodPolicy, RetryPolicy
from rpcwheel.errors import ConfigurationError
from rpcwheel.failback import FailbackPolicy
from rpcwheel.heartbeat import HeartbeatPolicy
from rpcwheel.idle import IdlePolicy
from rpcwheel.kit import KitPolicy
from rpcwheel.kit.config import policy_from_env, policy_from_file

TOML = """
timeout = { timeout = 2.0, slow_call_threshold = 1 }
retry = { retry_on = ["UNAVAILABLE", "INTERNAL"], max_attempts = 4, backoff = 0.5 }

[methods."/shop.Orders/Get*"]
idempotent = true
default_response = { on = ["UNAVAILABLE"], default = false }

[methods."/shop.Audit/*"]
timeout = 5
retry = false
failback = { retry_on = "UNAVAILABLE", max_attempts = 9, backoff = 1.0, metadata = ["x-*"] }
"""
YAML = """
timeout: {timeout: 2.0, slow_call_threshold: 1}
retry: {retry_on: [UNAVAILABLE, INTERNAL], max_attempts: 4, backoff: 0.5}
methods:
  /shop.Orders/Get*:
    idempotent: true
    default_response: {on: [UNAVAILABLE], default: false}
  /shop.Audit/*:
    timeout: 5
    retry: null
    failback: {retry_on: UNAVAILABLE, max_attempts: 9, backoff: 1.0, metadata: ["x-*"]}
"""
MEANT = KitPolicy(
    timeout={"timeout": 2.0, "slow_call_threshold": 1.0},
    retry=RetryPolicy(retry_on={"UNAVAILABLE", "INTERNAL"}, max_attempts=4, backoff=0.5),
    methods={
        "/shop.Orders/Get*": MethodPolicy(
            idempotent=True,
            default_response=DefaultResponsePolicy(on=["UNAVAILABLE"], default=False),
        ),
        "/shop.Audit/*": MethodPolicy(
            timeout=5,
            retry=None,
            failback=FailbackPolicy(
                retry_on="UNAVAILABLE", max_attempts=9, backoff=1.0, metadata=("x-*",)
            ),
        ),
    },
)


def from_env(prefix="RPCWHEEL_", **variables: str) -> KitPolicy:
    return policy_from_env(prefix, {prefix + name: value for name, value in variables.items()})


@pytest.fixture
def file(tmp_path):
    """Write a file and give its path."""

    def write(text: str, name: str = "shop.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


# Files


@pytest.mark.parametrize(
    ("name", "text"), [("shop.toml", TOML), ("shop.yaml", YAML), ("SHOP.YML", YAML)]
)
def test_a_file_says_the_same_as_code(file, name, text):
    assert policy_from_file(file(text, name)) == MEANT
    assert policy_from_file(str(file(text, name))) == MEANT


def test_an_empty_file_switches_nothing_on(file):
    for name in ("empty.toml", "empty.yaml"):
        assert policy_from_file(file("", name)) == KitPolicy()


def test_a_wait_in_a_file_is_seconds_or_a_table(file):
    text = 'retry = { retry_on = ["UNAVAILABLE"], backoff = { initial = 0.2, max = 5 } }'
    wait = policy_from_file(file(text)).retry.backoff
    assert isinstance(wait, tenacity.wait_random_exponential)
    assert (wait.multiplier, wait.max) == (0.2, 5.0)


def test_false_switches_off_in_a_file_what_none_does_in_code(file):
    text = """
    [methods."/a/*"]
    timeout = { timeout = false, message_timeout = false, propagate_deadline = false }
    retry = { retry_on = "UNAVAILABLE", retry_budget = false, attempt_timeout = false }
    default_response = false
    failback = false
    idempotent = false
    """
    own = policy_from_file(file(text)).methods["/a/*"]
    assert own.model_fields_set == {
        "timeout",
        "retry",
        "default_response",
        "failback",
        "idempotent",
    }
    assert (own.timeout.timeout, own.timeout.message_timeout) == (None, None)
    assert own.timeout.propagate_deadline is own.idempotent is False
    assert (own.retry.retry_budget, own.retry.attempt_timeout) == (None, None)
    assert own.default_response is own.failback is None


def test_false_is_no_count_because_that_could_mean_none_or_no_limit(file):
    with pytest.raises(ConfigurationError, match=r"failback\.max_attempts: .* integer, not False"):
        policy_from_file(file('failback = { retry_on = "UNAVAILABLE", max_attempts = false }'))


def test_a_default_is_taken_as_it_stands(file):
    path = file('failback = { retry_on = "UNAVAILABLE", default = { name = false, timeout = 1 } }')
    assert policy_from_file(path).failback.default == {"name": False, "timeout": 1}
    policy = from_env(CONFIG=str(path), FAILBACK__DEFAULT='{"other": 2}')
    assert policy.failback.default == {"other": 2}


def test_what_is_wrong_in_a_file_is_said_with_the_file_and_the_place(file):
    wrong = []
    for text, said in [
        ("timeot = 2.0", "there is no setting 'timeot'; did you mean 'timeout'?"),
        ('timeout = "2s"', "timeout: it must be seconds or a DeadlinePolicy, not '2s'"),
        ("timeout = inf", "for no limit leave it out"),
        ("retry = { max_attempts = 3 }", "retry: `retry_on` is missing; name the status codes"),
        (
            'retry = { retry_on = "UNAVAILABLE", max_attempts = 0 }',
            "retry.max_attempts: Input should be greater",
        ),
        ('retry = "UNAVAILABLE"', "retry: Input should be a valid dictionary or instance of Retry"),
        ('[methods."shop.Orders/*"]', "did you mean '/shop.Orders/*'?"),
        (
            '[methods."/a/b"]\nretry = {retry_on = ["UNAVAILBLE"]}',
            "methods[\"/a/b\"].retry.retry_on: `retry_on` names 'UNAVAILBLE', which is not a gRPC",
        ),
        (
            "[rpcwheel]\ntimeout = 2.0",
            "no setting 'rpcwheel'; write its settings at the top level, without it: timeout",
        ),
        (
            "[retrys]\nfoo = 1",
            "there is no setting 'retrys'; did you mean 'retry'?",
        ),
        ("message_timeout = 3", "did you mean timeout=DeadlinePolicy(message_timeout=3)?"),
        (
            'failback = { retry_on = "UNAVAILABLE", metadata = "authorization" }',
            """such as ('authorization',) (in a file ["authorization"]), not 'authorization'""",
        ),
        ("timeout = ", "not valid TOML: Invalid value (at end of document)"),
    ]:
        path = file(text)
        with pytest.raises(ConfigurationError) as refused:
            policy_from_file(path)
        told = str(refused.value)
        if said not in told or told.count(str(path)) != 1 or not told.startswith(f"{path}: "):
            wrong.append((text, told))
    assert wrong == []


def test_all_that_is_wrong_in_a_file_is_said_at_once(file):
    text = 'timeout = -1\nretry = {retry_on = "UNAVAILABLE", max_attempts = "3"}\nspeed = 1'
    with pytest.raises(ConfigurationError, match=r"timeout: .*; retry\.max_attempts: .*'speed'"):
        policy_from_file(file(text))


def test_a_file_that_holds_no_settings_is_refused(file):
    rows = [
        ("shop.json", "{}", "its name must end with .toml, .yaml, .yml"),
        ("shop.yaml", "a: [", "not valid YAML: "),
        ("shop.yaml", "a: 1\na: 2", "found duplicate key"),
        ("shop.yaml", "- timeout", "it must hold settings by name, not ['timeout']"),
        ("shop.yaml", "1: 2", '["1"]: Keys should be strings, not 1'),
        ("shop.yaml", "methods: {1: {timeout: 2}}", "valid string, not 1"),
    ]
    assert (
        not_refused_so(
            (partial(policy_from_file, file(text, name)), ConfigurationError, said)
            for name, text, said in rows
        )
        == []
    )


def test_a_file_that_can_not_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none\.toml: it can't be read: .*No such file"):
        policy_from_file(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigurationError, match=r"latin\.toml: it can't be read: .*utf-8"):
        policy_from_file(tmp_path / "latin.toml")


def test_yaml_without_its_extra_says_what_to_install_and_toml_needs_nothing(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rpcwheel\[config\]'; TOML needs"):
        policy_from_file(file(YAML, "shop.yaml"))
    assert policy_from_file(file(TOML)) == MEANT


# Hostile or broken input


def test_a_file_nested_too_deep_is_refused(file):
    said = "nested more than 50 levels deep"
    rows = [
        ("shop.toml", "retry = " + "[" * 5000 + "]" * 5000),
        ("shop.toml", "retry = " + "{a = " * 5000 + "1" + "}" * 5000),
        ("shop.toml", "retry = " + "[" * 51 + "]" * 51),
        ("shop.toml", ".".join(["a"] * 60) + " = 1"),
        ("shop.toml", "[" + ".".join(["a"] * 60) + "]"),
        ("shop.yaml", "retry: " + "[" * 5000 + "]" * 5000),
        ("shop.yaml", "retry: " + "{a: " * 5000 + "1" + "}" * 5000),
        ("shop.yaml", "\n".join(" " * level + "a:" for level in range(60))),
    ]
    assert (
        not_refused_so(
            (partial(policy_from_file, file(text, f"{number}{name}")), ConfigurationError, said)
            for number, (name, text) in enumerate(rows)
        )
        == []
    )


def test_a_toml_key_of_very_many_names_is_refused_before_it_is_parsed(file):
    """The time that tomllib takes grows with the square of their number: 80 s for this one."""
    path = file("timeout = 1\n" + ".".join(["a"] * 64_000) + " = 1")
    with pytest.raises(ConfigurationError, match="line 2 has more than 200 dots"):
        policy_from_file(path)


def test_a_file_of_more_than_a_megabyte_is_refused(file):
    said = "larger than 1,048,576 bytes; settings need a few thousand: check that it is the right"
    for text in ("#" * 2**20 + "\n", "#" * 2**20 + "\u20ac"):
        with pytest.raises(ConfigurationError, match=said):
            policy_from_file(file(text))


def test_an_integer_of_more_than_64_bits_is_refused(file):
    rows = [
        (
            "shop.toml",
            "retry = {retry_on = 'UNAVAILABLE', max_attempts = 18446744073709551616}",
            "attempts",
        ),
        ("shop.toml", "timeout = -" + "9" * 400, "timeout"),
        ("shop.toml", "timeout = 0x" + "9" * 9000, "timeout"),
        ("shop.toml", "[methods.'/a/b']\nfailback = {retry_on = [0b1" + "0" * 64 + "]}", 'on["0"]'),
        ("shop.yaml", "timeout: 0x" + "9" * 9000, "timeout"),
    ]
    assert (
        not_refused_so(
            (
                partial(policy_from_file, file(text, f"{number}{name}")),
                ConfigurationError,
                f"{place}: an integer may have at most 64 bits",
            )
            for number, (name, text, place) in enumerate(rows)
        )
        == []
    )


def test_an_integer_of_more_digits_than_python_parses_is_refused(file):
    for name, text in (("shop.toml", "timeout = "), ("shop.yaml", "timeout: ")):
        with pytest.raises(
            ConfigurationError,
            match=r": not valid (TOML|YAML): an integer may have at most 64 bits; give a smaller",
        ):
            policy_from_file(file(text + "9" * 5000, name))


def test_an_integer_of_64_bits_is_accepted_as_a_default(file):
    path = file("failback = {retry_on = 'UNAVAILABLE', default = {id = 18446744073709551615}}")
    assert policy_from_file(path).failback.default == {"id": 2**64 - 1}


def test_yaml_aliases_that_stand_for_too_many_values_are_refused(file):
    lists = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    tables = [f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 60)]
    merges = [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 30)]
    said = "its aliases stand for, more than 50,000 values"
    rows = [
        "\n".join(["a0: &a0 [1]", *lists]),
        "\n".join(["a0: &a0 {z: 1}", *tables]),
        "\n".join(["a0: &a0 {z: 1}", *merges]),
    ]
    assert (
        not_refused_so(
            (partial(policy_from_file, file(text, f"{n}.yaml")), ConfigurationError, said)
            for n, text in enumerate(rows)
        )
        == []
    )


def test_a_yaml_alias_for_the_value_that_contains_it_is_refused(file):
    for text in ("retry: &r {retry_on: [UNAVAILABLE], backoff: *r}", "methods: &m\n  '/a/b': *m\n"):
        with pytest.raises(ConfigurationError, match=r"line \d: the alias \*\w is inside"):
            policy_from_file(file(text, "shop.yaml"))


def test_a_yaml_alias_repeats_a_value(file):
    text = """
    retry: &retry {retry_on: [UNAVAILABLE], max_attempts: 2}
    methods:
      /a/*: {idempotent: true, retry: {<<: *retry, max_attempts: 4}}
      /b/*: {idempotent: true, retry: *retry}
    """
    methods = policy_from_file(file(text, "shop.yaml")).methods
    assert [methods[name].retry.max_attempts for name in ("/a/*", "/b/*")] == [4, 2]


def test_a_yaml_value_that_does_not_fit_its_tag_is_refused(file):
    rows = ["2020-13-40", "!!int abc", "!!float abc", "!!bool abc", "!!timestamp abc", "!!set [1]"]
    assert (
        not_refused_so(
            (
                partial(policy_from_file, file(f"timeout: {text}", f"{number}.yaml")),
                ConfigurationError,
                "not valid YAML: ",
            )
            for number, text in enumerate(rows)
        )
        == []
    )


def test_a_variable_nested_too_deep_is_refused():
    said = r"^RPCWHEEL_RETRY\S*: nested more than 50 levels deep; .* reduce the nesting$"
    for name, value in (
        ("RETRY", "[" * 100_000 + "]" * 100_000),
        ("RETRY", '{"a": ' * 60 + "1" + "}" * 60),
        ("RETRY__" + "__".join(["A"] * 3000), "1"),
        ("RETRY__" + "__".join(["A"] * 40), "[" * 40 + "]" * 40),
    ):
        with pytest.raises(ConfigurationError, match=said):
            from_env(**{name: value})


def test_a_variable_with_an_integer_of_more_than_64_bits_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"^RPCWHEEL_TIMEOUT: timeout: an integer may have at most 64 bits"
    ):
        from_env(TIMEOUT="9" * 400)


def test_a_long_value_is_shortened_in_the_message(file):
    for path in (file(f"timeout = '{'x' * 100_000}'"), file(f"retry = '{'x' * 100_000}'")):
        with pytest.raises(ConfigurationError) as refused:
            policy_from_file(path)
        assert len(str(refused.value)) < 1000


def test_a_long_value_of_any_setting_is_shortened_in_the_message(file):
    long = "x" * 50_000
    wrong = [
        f"timeout = '{long}'",
        f"timeout = {{timeout = '{long}'}}",
        f"idle = {{idle_timeout = 1, '{long}' = 1}}",
        f"{long} = 1",
        f"max_attempts = '{long}'",
        f"retry = {{retry_on = '{long}'}}",
        f"retry = {{retry_on = ['{long}']}}",
        f"failback = {{retry_on = ['{long}']}}",
        f"failback = {{retry_on = 'UNAVAILABLE', metadata = '{long}'}}",
        f"failback = {{retry_on = 'UNAVAILABLE', backoff = '{long}'}}",
        f"failback = {{retry_on = 'UNAVAILABLE', overflow = '{long}'}}",
        f"registry = {{snapshot = {{'{long}' = 1}}}}",
        f"[methods.'/{long}/']",
        f"[methods.'/a/{long}']\ntimeout = -1",
    ]
    lengths = {}
    for number, text in enumerate(wrong):
        with pytest.raises((ConfigurationError, TypeError)) as refused:
            policy_from_file(file(text, f"{number}.toml"))
        lengths[text[:60]] = len(str(refused.value))
    assert {text: length for text, length in lengths.items() if length > 1500} == {}


def test_a_long_value_of_a_variable_is_shortened_in_the_message():
    rows = (
        ("TIMEOUT__TIMEOUT", "9" * 10_000),
        ("TIMEOUT__TIMEOUT", "x" * 50_000),
        ("TIMEOUT__TIMEOUT", ", ".join(["x"] * 20_000)),
        ("RETRY__RETRY_ON", "[" + "x," * 20_000 + "]"),
        ("HEARTBEAT__INTERVAL", "9" * 10_000),
    )
    for name, value in rows:
        with pytest.raises(ConfigurationError) as refused:
            from_env(**{name: value})
        assert len(str(refused.value)) < 1000


def test_the_end_of_a_long_message_says_what_is_allowed(file):
    with pytest.raises(ConfigurationError, match=r"x \.\.\. .*or '\*' for all$"):
        policy_from_file(file(f"[methods.'{'x' * 5000}(']"))


def test_of_very_many_mistakes_the_message_lists_the_first_20(file):
    path = file("".join(f"a{number} = 1\n" for number in range(3000)))
    with pytest.raises(ConfigurationError, match=r"; and 2,980 more$") as refused:
        policy_from_file(path)
    assert str(refused.value).count("there is no setting") == 20


# The environment


def test_without_variables_nothing_is_switched_on():
    assert policy_from_env(environ={}) == KitPolicy()
    assert policy_from_env(environ={"HOME": "/", "RPCWHEEL": "x", "rpcwheel_x": "y"}) == KitPolicy()


def test_the_process_s_own_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("RPCWHEEL_TIMEOUT", "2.5")
    assert policy_from_env().timeout.timeout == 2.5


def test_a_variable_s_name_is_the_path_of_a_setting_and_its_value_json_or_a_word():
    policy = from_env(
        TIMEOUT="2.0",
        TIMEOUT__SLOW_CALL_THRESHOLD="1",
        RETRY__RETRY_ON='["UNAVAILABLE", "INTERNAL"]',
        RETRY__MAX_ATTEMPTS="4",
        RETRY__BACKOFF='{"initial": 0.1, "max": 1}',
        FAILBACK='{"retry_on": "UNAVAILABLE"}',
        FAILBACK__NAME="audit",
        IDEMPOTENT="true",
        METHODS='{"/a/*": {"timeout": 1, "failback": null}}',
    )
    assert (policy.timeout.timeout, policy.timeout.slow_call_threshold) == (2.0, 1.0)
    assert (policy.retry.retry_on, policy.retry.max_attempts) == ({"UNAVAILABLE", "INTERNAL"}, 4)
    assert policy.retry.backoff.max == 1.0
    assert (policy.failback.retry_on, policy.failback.name) == ("UNAVAILABLE", "audit")
    assert policy.idempotent is True
    assert policy.policy_for("/a/b").failback is None
    assert policy.policy_for("/a/b").timeout.timeout == 1.0


def test_of_two_variables_the_one_that_says_more_holds_and_is_named():
    one, other = ("RPCWHEEL_RETRY", "null"), ("RPCWHEEL_RETRY__RETRY_ON", "UNAVAILABLE")
    for environ in (dict([one, other]), dict([other, one])):
        assert policy_from_env(environ=environ).retry.retry_on == {"UNAVAILABLE"}
    with pytest.raises(ConfigurationError, match=r"^RPCWHEEL_RETRY__MAX_ATTEMPTS: "):
        from_env(RETRY='{"retry_on": "UNAVAILABLE", "max_attempts": 1}', RETRY__MAX_ATTEMPTS="0")


def test_a_plain_word_needs_no_quotes():
    assert from_env(RETRY__RETRY_ON="UNAVAILABLE").retry.retry_on == {"UNAVAILABLE"}


def test_variables_change_what_they_name_and_leave_the_rest_of_the_file(file):
    policy = from_env(
        CONFIG=str(file(TOML)),
        TIMEOUT="3",
        RETRY__MAX_ATTEMPTS="2",
        METHODS='{"/shop.Audit/*": {"timeout": {"slow_call_threshold": 2}},'
        ' "/new/*": {"timeout": 7}}',
    )
    assert (policy.timeout.timeout, policy.timeout.slow_call_threshold) == (3.0, 1.0)
    assert (policy.retry.retry_on, policy.retry.max_attempts) == ({"UNAVAILABLE", "INTERNAL"}, 2)
    audit = policy.methods["/shop.Audit/*"]
    assert (audit.timeout.timeout, audit.timeout.slow_call_threshold) == (5.0, 2.0)
    assert audit.failback == MEANT.methods["/shop.Audit/*"].failback
    assert policy.methods["/shop.Orders/Get*"] == MEANT.methods["/shop.Orders/Get*"]
    assert policy.methods["/new/*"].timeout.timeout == 7.0


def test_a_variable_can_switch_off_what_the_file_switches_on(file):
    for off in ("null", "false"):
        assert from_env(CONFIG=str(file(TOML)), RETRY=off).retry is None
        assert from_env(CONFIG=str(file(TOML)), TIMEOUT=off).timeout is None


def test_an_empty_variable_is_as_one_that_is_not_set():
    assert from_env(TIMEOUT="", CONFIG=" ") == KitPolicy()


def test_variables_of_ours_that_are_no_settings_do_no_harm():
    assert from_env(PURE="1", EXPECT="native") == KitPolicy()
    with pytest.raises(ConfigurationError, match="SHOP_PURE: there is no such setting"):
        from_env("SHOP_", PURE="1")


def test_another_prefix_takes_other_variables():
    environ = {"SHOP_RPC_TIMEOUT": "1", "RPCWHEEL_TIMEOUT": "2", "SHOP_DB": "postgres"}
    assert policy_from_env("SHOP_RPC_", environ).timeout.timeout == 1.0


def test_a_prefix_that_would_take_foreign_variables_is_refused():
    said = "prefix must be capital letters and end with '_'"
    rows = [
        (partial(policy_from_env, prefix, {}), ConfigurationError, said)
        for prefix in ("", "SHOP", "shop_", "_")
    ]
    assert not_refused_so(rows) == []


def test_a_wrong_variable_is_named_with_what_is_allowed():
    wrong = []
    for name, value, said in [
        (
            "TIMEOT",
            "2",
            "RPCWHEEL_TIMEOT: there is no such setting; did you mean RPCWHEEL_TIMEOUT?",
        ),
        ("SPEED", "2", "RPCWHEEL_SPEED: there is no such setting; there are RPCWHEEL_TIMEOUT, "),
        (
            "CONFIGG",
            "2",
            "RPCWHEEL_CONFIGG: there is no such setting; did you mean RPCWHEEL_CONFIG?",
        ),
        (
            "RETRY_BACKOFF",
            "1",
            "RPCWHEEL_RETRY_BACKOFF: there is no such setting; did you mean RPCWHEEL_RETRY__",
        ),
        (
            "TIMEOUT_SLOW_CALL_THRESHOLD",
            "1",
            (
                "RPCWHEEL_TIMEOUT_SLOW_CALL_THRESHOLD: there is no such setting; "
                "did you mean RPCWHEEL_TIMEOUT_"
            ),
        ),
        (
            "RETRY__RETRY_ON",
            "UNAVAILABLE,INTERNAL",
            'RPCWHEEL_RETRY__RETRY_ON (no JSON; a list is ["UNAVAILABLE", "INTERNAL"]): retry.',
        ),
        (
            "RETRY__RETRY_ON",
            '["UNAVAILABLE"',
            'RPCWHEEL_RETRY__RETRY_ON (no JSON; a list is ["UNAVAILABLE"]): retry.retry_on: ',
        ),
        ("RETRY__RETRY_ON", "UNAVAILBLE", "RPCWHEEL_RETRY__RETRY_ON: retry.retry_on: "),
        ("TIMEOUT", "2s", "RPCWHEEL_TIMEOUT: timeout: it must be seconds or a DeadlinePolicy"),
        ("TIMEOUT", "Infinity", "RPCWHEEL_TIMEOUT: timeout"),
        ("TIMEOUT__TIMEOT", "2", "RPCWHEEL_TIMEOUT__TIMEOT: timeout: there is no setting 'timeot'"),
        ("RETRY", '{"max_attempts": 2}', "RPCWHEEL_RETRY: retry: `retry_on` is missing"),
        (
            "RETRY__RETRY_ON",
            '["OK"]',
            "RPCWHEEL_RETRY__RETRY_ON: retry.retry_on: `retry_on` names the status code OK",
        ),
        ("METHODS", "none", "RPCWHEEL_METHODS: methods: Input should be a valid dictionary"),
        (
            "IDEMPOTENT",
            "yes",
            "RPCWHEEL_IDEMPOTENT: idempotent: it must be true or false",
        ),
        ("CONFIG", "none.toml", "none.toml: it can't be read"),
        ("CONFIG__X", "1", "RPCWHEEL_CONFIG__X: there is no setting 'config'"),
    ]:
        with pytest.raises(ConfigurationError) as refused:
            from_env(**{name: value})
        if not str(refused.value).startswith(said):
            wrong.append((name, value, str(refused.value)))
    assert wrong == []


def test_each_mistake_names_the_file_or_the_variable_that_it_came_from(file):
    path = file('timeout = -1\nretry = { retry_on = "UNAVAILABLE", max_attempts = 0 }')
    with pytest.raises(ConfigurationError) as refused:
        from_env(CONFIG=str(path), RETRY__BACKOFF="-2", RETRY__RETRY_BUDGET="3")
    assert str(refused.value) == (
        f"{path}: timeout: it must be a finite time above zero (at least 1 ns), not -1; "
        "retry.max_attempts: Input should be greater than or equal to 1, not 0; "
        "RPCWHEEL_RETRY__BACKOFF: retry.backoff: wait must not be negative, not -2; 0 is at once; "
        "RPCWHEEL_RETRY__RETRY_BUDGET: retry.retry_budget: "
        "it must be a share from 0 to 1, or a RetryThrottling, not 3"
    )


def test_a_variable_that_names_no_setting_is_reported_before_what_is_missing():
    with pytest.raises(ConfigurationError) as refused:
        from_env(RETRY__ATEMPTS="3")
    assert str(refused.value).startswith(
        "RPCWHEEL_RETRY__ATEMPTS: retry: there is no setting 'atempts'; "
        "did you mean 'max_attempts'?; "
        "retry: `retry_on` is missing; "
    )


def test_a_variable_does_not_change_the_other_aliases_of_a_yaml_value(file):
    text = "retry: &r {retry_on: [UNAVAILABLE]}\nmethods: {/a/*: {idempotent: true, retry: *r}}"
    policy = from_env(CONFIG=str(file(text, "shop.yaml")), RETRY__MAX_ATTEMPTS="7")
    assert policy.retry.max_attempts == 7
    assert (
        policy.methods["/a/*"].retry.max_attempts
        == RetryPolicy(retry_on="UNAVAILABLE").max_attempts
    )


def test_a_contradiction_names_all_that_it_may_come_from(file):
    path = file("timeout = 1.0")
    with pytest.raises(ConfigurationError, match=r"shop\.toml, RPCWHEEL_RETRY: retry: backoff \(5"):
        from_env(CONFIG=str(path), RETRY='{"retry_on": "UNAVAILABLE", "backoff": 5}')


def test_a_number_for_heartbeats_and_idle_connections_is_short_for_a_table(file):
    policy = policy_from_file(file("heartbeat = 10\nidle = { close = 'report' }\n"))
    assert policy == KitPolicy(heartbeat=10, idle=IdlePolicy(close="report"))


def test_a_variable_changes_one_setting_of_what_a_number_stood_for(file):
    path = file("heartbeat = 10\n")
    policy = from_env(CONFIG=str(path), HEARTBEAT__TIMEOUT="25", IDLE="60")
    assert policy.heartbeat == HeartbeatPolicy(interval=10, timeout=25)
    assert policy.idle == IdlePolicy(idle_timeout=60)
