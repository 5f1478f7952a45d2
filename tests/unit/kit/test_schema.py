"""The JSON schema of a settings file."""

import re
import tomllib
from pathlib import Path

import pytest

from rpcwheel.errors import ConfigurationError
from rpcwheel.kit import KitPolicy, settings_schema
from rpcwheel.kit.config import policy_from_file

PAGE = Path(__file__).parents[3].joinpath("docs", "policies.md").read_text()

VALID = [
    *re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE),
    "",
    "timeout = { timeout = false, message_timeout = 3 }\nidle = 180\nheartbeat = 10.5",
    "idle = { heartbeats = '/shop.Orders/Ping', max_age_grace = 0 }",
    "hedging = 0\nidempotent = true\nwait_for_ready = false\ncriticality = 'critical_plus'",
    "criticality = 'Sheddable-Plus'\nlimit = { max_criticality = 'CRITICAL_PLUS' }",
    "hedging = { delay = 1, non_fatal_codes = [] }",
    "[methods.'/shop.Reports/*']\ncriticality = 'sheddable'\n[methods.'/a/*']\ncriticality = false",
    "[methods.'/shop.Orders/*']\nretry = false\ntimeout = false\nfailback = false",
    "limit = 'adaptive'\n[methods.'/shop.Reports/*']\nlimit = 3\n[methods.'/a/*']\nlimit = false",
    "limit = 50",
    "limit = { rate = 100 }\n[methods.'/a/*']\nlimit = { rate = { rate = 0.5, burst = 3 } }",
    "limit = { max_streams = 9, max_wait = 0.5, pushback = 2, max_criticality = 'critical' }",
    "registry_policy = { lease_ttl = 5, backoff = { initial = 1, max = 2, multiplier = 3 } }",
    "registry_policy = { snapshot = '/var/cache/registry.json' }",
    "retry = { retry_on = 'UNAVAILABLE', retry_budget = { max_tokens = 10, token_ratio = 0.1 } }",
    "failback = { retry_on = 'UNAVAILABLE', max_attempts = false }",
    "failback = { retry_on = ['INTERNAL'], default = { any = ['thing'] }, overflow = 'drop' }",
]

INVALID = [
    "timeot = 1",
    "timeout = '2s'",
    "timeout = 0",
    "retry = { max_attempts = 3 }",
    "retry = { retry_on = 'UNAVAILBLE' }",
    "retry = { retry_on = [] }",
    "retry = { retry_on = 'UNAVAILABLE', max_attempts = 0 }",
    "retry = { retry_on = 'UNAVAILABLE', retry_budget = 2 }",
    "retry = { retry_on = 'UNAVAILABLE', backoff = { initial = 1 } }",
    "retry = { retry_on = 'UNAVAILABLE', max_attempts = false }",
    "failback = { retry_on = 'UNAVAILABLE', overflow = 'wait' }",
    "idempotent = 1",
    "criticality = 'urgent'",
    "criticality = 'sheddable plus'",
    "hedging = { delay = 1, non_fatal_codes = ['UNAVAILBLE'] }",
    "criticality = 1",
    "limit = 0",
    "limit = 1.5",
    "limit = true",
    "limit = 'adaptve'",
    "limit = { max_concurent = 5 }",
    "limit = { max_wait = 0 }",
    "limit = { max_criticality = 'urgent' }",
    "idle = { max_age_grace = -1 }",
    "[methods.'shop.Orders/Get']\ntimeout = 1",
    "[methods.'/shop.Orders/Get']\nheartbeat = 1",
]


@pytest.fixture(scope="module")
def validator():
    jsonschema = pytest.importorskip("jsonschema")
    schema = settings_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("text", VALID)
def test_the_schema_accepts_a_file_that_loads(validator, file, text):
    policy_from_file(file(text))
    assert list(validator.iter_errors(tomllib.loads(text))) == []


@pytest.mark.parametrize("text", INVALID)
def test_the_schema_refuses_a_file_that_does_not_load(validator, file, text):
    with pytest.raises(ConfigurationError):
        policy_from_file(file(text))
    assert list(validator.iter_errors(tomllib.loads(text)))


def test_each_setting_has_a_description_in_the_schema():
    schema = settings_schema()
    tables = {"KitPolicy": schema, **schema["$defs"]}
    assert [
        f"{table}.{name}"
        for table, content in tables.items()
        for name, setting in content["properties"].items()
        if not setting.get("description")
    ] == []
    assert set(schema["properties"]) == set(KitPolicy.model_fields)
    assert schema["$defs"]["RetryPolicy"]["required"] == ["retry_on"]


def test_settings_that_only_code_can_give_are_not_in_the_schema():
    properties = settings_schema()["$defs"]["FailbackPolicy"]["properties"]
    assert not {"stop", "dead_letter"} & properties.keys()
