"""Settings from files and from the environment."""

import sys

import pytest

from rpcwheel.backoff import JitteredWait
from rpcwheel.call import Criticality, DefaultResponsePolicy, MethodPolicy, RetryPolicy
from rpcwheel.errors import ConfigurationError
from rpcwheel.failback import FailbackPolicy
from rpcwheel.heartbeat import HeartbeatPolicy
from rpcwheel.idle import IdlePolicy
from rpcwheel.kit import KitPolicy
from rpcwheel.kit.config import policy_from_env, policy_from_file
from rpcwheel.limit import LimitPolicy

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


# Files


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shop.toml", TOML),
        ("shop.yaml", YAML),
        ("SHOP.YML", YAML),
        ("windows.toml", f"\ufeff{TOML}"),
    ],
)
def test_toml_and_yaml_files_give_the_same_policy_as_code(file, name, text):
    assert policy_from_file(file(text, name)) == MEANT
    assert policy_from_file(str(file(text, name))) == MEANT


def test_an_empty_file_switches_nothing_on(file):
    for name in ("empty.toml", "empty.yaml"):
        assert policy_from_file(file("", name)) == KitPolicy()


def test_a_backoff_in_a_file_may_be_a_table(file):
    text = 'retry = { retry_on = ["UNAVAILABLE"], backoff = { initial = 0.2, max = 5 } }'
    assert policy_from_file(file(text)).retry.backoff == JitteredWait(initial=0.2, max=5.0)


def test_false_in_a_file_means_none(file):
    text = """
    [methods."/a/*"]
    timeout = { timeout = false, message_timeout = false, propagate_deadline = false }
    retry = { retry_on = "UNAVAILABLE", retry_budget = false, attempt_timeout = false }
    default_response = false
    failback = false
    idempotent = false
    wait_for_ready = false
    [methods."/b/*"]
    failback = { retry_on = "UNAVAILABLE", max_attempts = false }
    """
    methods = policy_from_file(file(text)).methods
    own = methods["/a/*"]
    assert own.model_fields_set == {
        "timeout",
        "retry",
        "default_response",
        "failback",
        "idempotent",
        "wait_for_ready",
    }
    assert (own.timeout.timeout, own.timeout.message_timeout) == (None, None)
    assert own.timeout.propagate_deadline is own.idempotent is own.wait_for_ready is False
    assert (own.retry.retry_budget, own.retry.attempt_timeout) == (None, None)
    assert own.default_response is own.failback is None
    assert methods["/b/*"].failback.max_attempts is None


def test_a_default_response_in_a_file_is_not_changed(file):
    path = file('failback = { retry_on = "UNAVAILABLE", default = { name = false, timeout = 1 } }')
    assert policy_from_file(path).failback.default == {"name": False, "timeout": 1}
    policy = from_env(CONFIG=str(path), FAILBACK__DEFAULT='{"other": 2}')
    assert policy.failback.default == {"other": 2}


def test_yaml_without_its_package_raises_an_error_with_the_extra(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rpcwheel\[config\]'; TOML needs"):
        policy_from_file(file(YAML, "shop.yaml"))
    assert policy_from_file(file(TOML)) == MEANT


DEEP = "nested more than 50 levels deep"
BITS = "an integer may have at most 64 bits"
ALIASES = "its aliases stand for, more than 50,000 values"


def yaml_of_aliases(first: str, line: str, count: int) -> str:
    """Lines where each repeats the one before several times."""
    lines = [line.format(n=n, before=f"*a{n - 1}") for n in range(1, count)]
    return "\n".join([f"a0: &a0 {first}", *lines])


NINE = ", ".join(["{before}"] * 9)

REFUSED_TOML = {
    # Settings
    "timeot = 2.0": "there is no setting 'timeot'; did you mean 'timeout'?",
    'retry = { retry_on = "UNAVAILABLE", max_attempts = false }': "integer, not False",
    '[methods."/a/b"]\nretry = {retry_on = ["UNAVAILBLE"]}': (
        "methods[\"/a/b\"].retry.retry_on: it names 'UNAVAILBLE', which is not a gRPC"
    ),
    "[retry]\nretry_on = 'UNAVAILABLE'\ntimeout = 2.0": (
        "retry: there is no setting 'timeout'; it is a setting of the top level: in TOML, write it "
        "before the first [table]; or did you mean 'attempt_timeout'?"
    ),
    "[methods.'/a/*'.retry]\nretry_on = 'UNAVAILABLE'\nidempotent = true": (
        "methods[\"/a/*\"].retry: there is no setting 'idempotent'; it is a setting of "
        'methods["/a/*"]'
    ),
    "[methods.'/a/*']\nidempotent = true\nheartbeat = 10": (
        "methods[\"/a/*\"]: there is no setting 'heartbeat'; it is a setting of the top level: "
    ),
    "[rpcwheel]\ntimeout = 2.0": (
        "no setting 'rpcwheel'; write its settings at the top level, without it: timeout"
    ),
    "timeout = '2s'": (
        "timeout: it must be seconds (a number) or a DeadlinePolicy (in a file a table such as "
        "{timeout = 2}), not '2s'"
    ),
    "retry = {retry_on = 'UNAVAILABLE', backoff = '100ms'}": (
        "retry.backoff: it must be seconds (a number), a table such as {initial = 0.1, max = 10} "
        "(in code a dict), or in code a timedelta or a tenacity wait object such as "
        "wait_exponential(max=60), not '100ms'"
    ),
    # Nesting, size and large numbers
    "timeout = ": "not valid TOML: Invalid value (at end of document)",
    "retry = " + "[" * 5000 + "]" * 5000: DEEP,
    "retry = " + "{a = " * 5000 + "1" + "}" * 5000: DEEP,
    "retry = " + "[" * 51 + "]" * 51: DEEP,
    ".".join(["a"] * 60) + " = 1": DEEP,
    "[" + ".".join(["a"] * 60) + "]": DEEP,
    # The time that tomllib takes grows with the square of their number: 80 s for this one.
    "timeout = 1\n" + ".".join(["a"] * 64_000) + " = 1": "line 2 has more than 200 dots",
    "#" * 2**20 + "\n": "larger than 1,048,576 bytes; settings need a few thousand: check that",
    "#" * 2**20 + "\u20ac": "larger than 1,048,576 bytes",
    "retry = {retry_on = 'UNAVAILABLE', max_attempts = 18446744073709551616}": f"attempts: {BITS}",
    "timeout = -" + "9" * 400: f"timeout: {BITS}",
    "timeout = 0x" + "9" * 9000: f"timeout: {BITS}",
    "timeout = " + "9" * 5000: f"not valid TOML: {BITS}; give a smaller",
    "[methods.'/a/b']\nfailback = {retry_on = [0b1" + "0" * 64 + "]}": f"on[0]: {BITS}",
}

REFUSED_YAML = {
    "timeout: 1\nmethods: [1,\nretry: 2": (
        "not valid YAML: line 3, column 9: while parsing a flow sequence (line 2), expected ',' or "
        "']', but got '<stream end>'"
    ),
    "a: b: c": "not valid YAML: line 1, column 5: mapping values are not allowed here",
    "a: @b": "line 1, column 4: while scanning for the next token, found character '@' that",
    "a: \0": "not valid YAML: unacceptable character #x0000: special characters are not",
    "a: 1\na: 2": (
        'line 2, column 1: while constructing a mapping (line 1), found duplicate key "a"'
    ),
    "- timeout": "it must hold settings by name, not ['timeout']",
    "1: 2": "[1]: Keys should be strings, not 1",
    "methods: {1: {timeout: 2}}": "valid string, not 1",
    "retry: {retry_on: UNAVAILABLE, timeout: 2}": "'timeout'; it is a setting of the top level: ",
    "retry: " + "[" * 5000 + "]" * 5000: DEEP,
    "retry: " + "{a: " * 5000 + "1" + "}" * 5000: DEEP,
    "\n".join(" " * level + "a:" for level in range(60)): DEEP,
    "timeout: 0x" + "9" * 9000: f"timeout: {BITS}",
    "timeout: " + "9" * 5000: f"not valid YAML: {BITS}; give a smaller",
    yaml_of_aliases("[1]", f"a{{n}}: &a{{n}} [{NINE}]", 30): ALIASES,
    yaml_of_aliases("{z: 1}", "a{n}: &a{n} {{x: {before}, y: {before}}}", 60): ALIASES,
    yaml_of_aliases("{z: 1}", f"a{{n}}: &a{{n}} {{{{<<: [{NINE}]}}}}", 30): ALIASES,
    "retry: &r {retry_on: [UNAVAILABLE], backoff: *r}": "line 1: the alias *r is inside",
    "methods: &m\n  '/a/b': *m\n": "line 2: the alias *m is inside",
    **dict.fromkeys(
        (
            f"timeout: {value}"
            for value in (
                "2020-13-40", "!!int abc", "!!float abc", "!!bool abc", "!!timestamp abc",
                "!!set [1]",
            )
        ),
        "not valid YAML: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("shop.toml", REFUSED_TOML),
        ("shop.yaml", REFUSED_YAML),
        ("shop.json", {"{}": "its name must end with .toml, .yaml, .yml"}),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_the_place(file, name, table):
    wrong = {}
    for text, said in table.items():
        path = file(text, name)
        with pytest.raises(ConfigurationError) as refused:
            policy_from_file(path)
        message = str(refused.value)
        names_file = message.startswith(f"{path}: ") and message.count(str(path)) == 1
        if said not in message or not names_file or ("not valid" in message and "\n" in message):
            wrong[text[:200]] = message
    assert wrong == {}


def test_a_file_that_can_not_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none\.toml: it can't be read: .*No such file"):
        policy_from_file(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigurationError, match=r"latin\.toml: it can't be read: .*utf-8"):
        policy_from_file(tmp_path / "latin.toml")


# Hostile or broken input


def test_an_integer_of_64_bits_is_accepted_as_a_default(file):
    path = file("failback = {retry_on = 'UNAVAILABLE', default = {id = 18446744073709551615}}")
    assert policy_from_file(path).failback.default == {"id": 2**64 - 1}


def test_a_yaml_alias_repeats_a_value(file):
    text = """
    retry: &retry {retry_on: [UNAVAILABLE], max_attempts: 2}
    methods:
      /a/*: {idempotent: true, retry: {<<: *retry, max_attempts: 4}}
      /b/*: {idempotent: true, retry: *retry}
    """
    methods = policy_from_file(file(text, "shop.yaml")).methods
    assert [methods[name].retry.max_attempts for name in ("/a/*", "/b/*")] == [4, 2]


def test_a_long_value_of_a_setting_or_a_variable_is_shortened_in_the_message(file):
    long = "x" * 50_000
    wrong = [
        f"timeout = '{long}'",
        f"timeout = {{timeout = '{long}'}}",
        f"idle = {{idle_timeout = 1, '{long}' = 1}}",
        f"{long} = 1",
        f"retry = {{retry_on = '{long}'}}",
        f"failback = {{retry_on = ['{long}']}}",
        f"failback = {{retry_on = 'UNAVAILABLE', metadata = '{long}'}}",
        f"failback = {{retry_on = 'UNAVAILABLE', backoff = '{long}'}}",
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
    for name, value in (
        ("TIMEOUT__TIMEOUT", "9" * 10_000),
        ("TIMEOUT__TIMEOUT", ", ".join(["x"] * 20_000)),
        ("RETRY__RETRY_ON", "[" + "x," * 20_000 + "]"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            from_env(**{name: value})
        assert len(str(refused.value)) < 1000
    with pytest.raises(ConfigurationError, match=r"x \.\.\. .*or '\*' for all$"):  # in the middle
        policy_from_file(file(f"[methods.'{'x' * 5000}(']"))


def test_an_error_lists_at_most_20_mistakes(file):
    path = file("".join(f"a{number} = 1\n" for number in range(3000)))
    with pytest.raises(ConfigurationError, match=r"\nand 2,980 more$") as refused:
        policy_from_file(path)
    assert str(refused.value).count("there is no setting") == 20


# The environment


def test_without_variables_the_policy_is_empty():
    assert policy_from_env(environ={}) == KitPolicy()
    assert policy_from_env(environ={"HOME": "/", "RPCWHEEL": "x", "rpcwheel_x": "y"}) == KitPolicy()
    assert from_env(TIMEOUT="", CONFIG=" ") == KitPolicy()


@pytest.mark.parametrize("off", ["null", "false"])
def test_a_variable_can_switch_the_status_token_of_the_file_off(off, file):
    path = file("status_token = 'swordfish-swordfish'")
    assert from_env(CONFIG=str(path), STATUS_TOKEN=off).status_token is None


def test_a_variable_name_is_the_path_of_a_setting_and_its_value_json_or_text():
    policy = from_env(
        TIMEOUT="2.0",
        TIMEOUT__SLOW_CALL_THRESHOLD="1",
        RETRY__RETRY_ON='["UNAVAILABLE", "INTERNAL"]',
        RETRY__MAX_ATTEMPTS="4",
        RETRY__BACKOFF='{"initial": 0.1, "max": 1}',
        FAILBACK='{"retry_on": "UNAVAILABLE"}',
        FAILBACK__NAME="audit",
        IDEMPOTENT="true",
        CRITICALITY="SHEDDABLE-PLUS",
        LIMIT="adaptive",
        STATUS_PORT="0",
        STATUS_HOST="127.0.0.2",
        STATUS_TOKEN="1234567890123456",
        METHODS='{"/a/*": {"timeout": 1, "failback": null}}',
    )
    assert (policy.timeout.timeout, policy.timeout.slow_call_threshold) == (2.0, 1.0)
    assert (policy.retry.retry_on, policy.retry.max_attempts) == ({"UNAVAILABLE", "INTERNAL"}, 4)
    assert policy.retry.backoff.max == 1.0
    assert (policy.failback.retry_on, policy.failback.name) == ("UNAVAILABLE", "audit")
    assert policy.idempotent is True
    assert policy.criticality is Criticality.SHEDDABLE_PLUS
    assert policy.limit == LimitPolicy()
    assert (policy.status_port, policy.status_host) == (0, "127.0.0.2")
    assert policy.status_token.get_secret_value() == "1234567890123456"
    assert from_env(LIMIT="7", LIMIT__MAX_WAIT="0.5").limit == LimitPolicy(
        max_concurrent=7, max_wait=0.5
    )
    assert policy.policy_for("/a/b").failback is None
    assert policy.policy_for("/a/b").timeout.timeout == 1.0


def test_the_longer_of_two_variable_names_takes_precedence():
    one, other = ("RPCWHEEL_RETRY", "null"), ("RPCWHEEL_RETRY__RETRY_ON", "UNAVAILABLE")
    for environ in (dict([one, other]), dict([other, one])):
        assert policy_from_env(environ=environ).retry.retry_on == {"UNAVAILABLE"}
    with pytest.raises(ConfigurationError, match=r"^RPCWHEEL_RETRY__MAX_ATTEMPTS: "):
        from_env(RETRY='{"retry_on": "UNAVAILABLE", "max_attempts": 1}', RETRY__MAX_ATTEMPTS="0")


def test_a_variable_overrides_one_setting_of_the_file_or_switches_it_off(file):
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
    policy = from_env(
        **{"METHODS__/shop.Orders/Get__TIMEOUT": "2", "METHODS__*__IDEMPOTENT": "true"}
    )
    assert policy.methods["/shop.Orders/Get"].timeout.timeout == 2.0
    assert policy.methods["*"].idempotent
    for off in ("null", "false"):
        policy = from_env(CONFIG=str(file(TOML)), RETRY=off, TIMEOUT=off)
        assert policy.retry is policy.timeout is None


@pytest.mark.parametrize("service", ["SHOP_RPC", "SHOP_RPC_STOCK", "SHOP_RPC_STATUS"])
def test_variables_of_a_kubernetes_service_with_the_name_of_the_prefix_are_ignored(service):
    port = f"{service}_PORT_50051_TCP"
    variables = {
        f"{service}_SERVICE_HOST": "10.0.0.7",
        f"{service}_SERVICE_PORT": "50051",
        f"{service}_SERVICE_PORT_GRPC": "50051",
        f"{service}_PORT": "tcp://10.0.0.7:50051",
        port: "tcp://10.0.0.7:50051",
        f"{port}_PROTO": "tcp",
        f"{port}_PORT": "50051",
        f"{port}_ADDR": "10.0.0.7",
        "SHOP_RPC_TIMEOUT": "5",
    }
    assert policy_from_env("SHOP_RPC_", variables) == KitPolicy(timeout=5.0)


def test_a_setting_that_is_named_as_a_variable_of_a_service_applies():
    variables = {"SHOP_RPC_STATUS_PORT": "8080", "SHOP_RPC_STATUS_SERVICE_HOST": "10.0.0.7"}
    assert policy_from_env("SHOP_RPC_", variables) == KitPolicy(status_port=8080)


@pytest.mark.parametrize("name", ["SHOP_RPC_PORT", "SHOP_RPC_STATE_PORT", "SHOP_RPC_PORT_1_TCP"])
def test_a_variable_that_is_named_as_those_of_a_missing_service_is_an_unknown_setting(name):
    variables = {name: "1", "SHOP_SERVICE_HOST": "10.0.0.7"}
    with pytest.raises(ConfigurationError, match=f"{name}: there is no such setting"):
        policy_from_env("SHOP_RPC_", variables)


def test_variables_for_building_metrics_and_traces_are_ignored():
    assert from_env(PURE="1", METRICS="off", TRACES="off") == KitPolicy()
    with pytest.raises(ConfigurationError, match="SHOP_PURE: there is no such setting"):
        from_env("SHOP_", PURE="1")


UNKNOWN = "there is no such setting; did you mean "
REFUSED_VARIABLES = [
    ("TIMEOT", "2", f": {UNKNOWN}RPCWHEEL_TIMEOUT?"),
    ("SPEED", "2", ": there is no such setting; there are RPCWHEEL_TIMEOUT, "),
    ("CONFIGG", "2", f": {UNKNOWN}RPCWHEEL_CONFIG?"),
    ("RETRY_BACKOFF", "1", f": {UNKNOWN}RPCWHEEL_RETRY__BACKOFF?"),
    ("RETRY__RETRY_ON", "A,B", ' (not JSON; a list is written ["A", "B"]): retry.retry_on: '),
    ("RETRY__RETRY_ON", '["A"', ' (not JSON; a list is written ["A"]): retry.retry_on: '),
    ("FAILBACK__JOURNAL", "a://b,c?d", ' (not JSON; a list is written ["a://b", "c"]): '),
    ("FAILBACK__JOURNAL", "b:c@d,e", ' (not JSON; a list is written ["...", "..."]): '),
    ("STATUS_TOKEN", "SECRET,token", ": status_token must have 16 characters or more"),
    ("RETRY__RETRY_ON", "UNAVAILBLE", ": retry.retry_on: "),
    ("TIMEOUT__TIMEOT", "2", ": timeout: there is no setting 'timeot'"),
    ("RETRY", '{"max_attempts": 2}', ": retry: `retry_on` is missing"),
    ("METHODS", "none", ": methods: it must be a valid dictionary"),
    ("IDEMPOTENT", "yes", ": idempotent: it must be true or false"),
    ("CRITICALITY", "urgent", ": criticality: it is 'urgent', which is not a criticality; "),
    ("LIMIT", "adaptve", ': limit: it must be "adaptive", a number of calls, or a LimitPolicy, '),
    ("LIMIT", "0", ': limit.max_concurrent: it must be "adaptive" or a number of calls, not 0; '),
    ("CONFIG__X", "1", ": there is no setting 'config'"),
    ("TIMEOUT", "9" * 400, f": timeout: {BITS}"),
    ("RETRY", "[" * 100_000 + "]" * 100_000, f": {DEEP}; "),
    ("RETRY", '{"a": ' * 60 + "1" + "}" * 60, f": {DEEP}; "),
]


def test_an_error_names_the_variable():
    wrong = []
    for name, value, message in REFUSED_VARIABLES:
        with pytest.raises(ConfigurationError) as refused:
            from_env(**{name: value})
        if not str(refused.value).startswith(f"RPCWHEEL_{name}{message}"):
            wrong.append((name, value[:50], str(refused.value)))
    assert wrong == []
    for name, value in (
        ("RETRY__" + "__".join(["A"] * 3000), "1"),
        ("RETRY__" + "__".join(["A"] * 40), "[" * 40 + "]" * 40),
    ):
        with pytest.raises(ConfigurationError, match=rf": {DEEP}; .* reduce the nesting$"):
            from_env(**{name: value})
    with pytest.raises(ConfigurationError, match=r"^none\.toml: it can't be read"):
        from_env(CONFIG="none.toml")


def test_each_mistake_names_its_file_or_variable(file):
    path = file('timeout = -1\nretry = { retry_on = "UNAVAILABLE", max_attempts = 0 }')
    with pytest.raises(ConfigurationError) as refused:
        from_env(CONFIG=str(path), RETRY__BACKOFF="-2", RETRY__RETRY_BUDGET="3", IDEL="9")
    assert str(refused.value) == (
        f"RPCWHEEL_IDEL: {UNKNOWN}RPCWHEEL_IDLE?\n"
        f"{path}: timeout: it must be a finite time above zero (at least 1 ns), not -1\n"
        f"{path}: retry.max_attempts: it must be greater than or equal to 1, not 0\n"
        "RPCWHEEL_RETRY__BACKOFF: retry.backoff: it must not be negative, not -2; 0 is at once\n"
        "RPCWHEEL_RETRY__RETRY_BUDGET: retry.retry_budget: "
        "it must be a share from 0 to 1, or a RetryThrottling, not 3"
    )
    with pytest.raises(ConfigurationError) as refused:
        from_env(TIMEOT="2", FAILBACK='{"retry_on": "UNAVAILABLE", "journal": "sqlite:///"}')
    named = [line.partition(":")[0] for line in refused.value.problems]
    assert named == ["RPCWHEEL_TIMEOT", "RPCWHEEL_FAILBACK"]
    with pytest.raises(ConfigurationError) as refused:
        from_env(RETRY__ATEMPTS="3")
    assert str(refused.value).startswith(  # an unknown setting before a missing one
        "RPCWHEEL_RETRY__ATEMPTS: retry: there is no setting 'atempts'; "
        "did you mean 'max_attempts'?\n"
        "RPCWHEEL_RETRY__ATEMPTS: retry: `retry_on` is missing; "
    )


def test_a_variable_does_not_change_other_aliases_of_a_yaml_value(file):
    text = "retry: &r {retry_on: [UNAVAILABLE]}\nmethods: {/a/*: {idempotent: true, retry: *r}}"
    policy = from_env(CONFIG=str(file(text, "shop.yaml")), RETRY__MAX_ATTEMPTS="7")
    assert policy.retry.max_attempts == 7
    assert (
        policy.methods["/a/*"].retry.max_attempts
        == RetryPolicy(retry_on="UNAVAILABLE").max_attempts
    )


def test_a_contradiction_names_the_file_and_all_variables(file):
    path = file("timeout = 1.0")
    with pytest.raises(ConfigurationError, match=r"shop\.toml, RPCWHEEL_RETRY: retry: backoff \(5"):
        from_env(CONFIG=str(path), RETRY='{"retry_on": "UNAVAILABLE", "backoff": 5}')


def test_a_variable_overrides_one_setting_of_a_policy_given_as_a_number(file):
    path = file("heartbeat = 10\n")
    policy = from_env(CONFIG=str(path), HEARTBEAT__TIMEOUT="25", IDLE="60")
    assert policy.heartbeat == HeartbeatPolicy(interval=10, timeout=25)
    assert policy.idle == IdlePolicy(idle_timeout=60)
