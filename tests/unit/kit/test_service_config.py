"""The policy that is made from a service config of gRPC."""

import json
import random
import re

import pytest
import tenacity
from hypothesis import given
from hypothesis import strategies as st

from rpcwheel import ConfigurationError, MethodPolicy
from rpcwheel.backoff import failed_state
from rpcwheel.call import RetryThrottling
from rpcwheel.call.policy import HedgingPolicy
from rpcwheel.kit import KitPolicy
from rpcwheel.kit.service_config import policy_from_service_config

RETRY = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
ORDERS = {"service": "shop.Orders"}
GET = {"service": "shop.Orders", "method": "Get"}


def methods(*entries, **more):
    return policy_from_service_config({"methodConfig": list(entries)} | more)


def of(policy, method):
    """What holds for one method, without what a service config can't set."""
    found = policy.policy_for(method)
    timeout = found.timeout and found.timeout.timeout
    return timeout, found.wait_for_ready, found.retry, found.hedging, found.idempotent


def retry_of(**settings):
    return methods({"name": [{}], "retryPolicy": RETRY | settings}).retry


def test_an_empty_service_config_sets_nothing():
    for empty in ({}, "{}", {"methodConfig": []}, {"methodConfig": [{}]}):
        policy = policy_from_service_config(empty)
        assert policy == KitPolicy()
        assert of(policy, "/a/b") == (None, None, None, None, False)


def test_text_a_mapping_and_a_file_give_the_same_policy(file):
    tree = {"methodConfig": [{"name": [GET], "timeout": "2s", "waitForReady": True}]}
    path = file(json.dumps(tree), "service_config.json")
    expected = MethodPolicy(
        timeout=2.0, wait_for_ready=True, retry=None, hedging=None, idempotent=False
    )
    for config in (tree, json.dumps(tree), path):
        policy = policy_from_service_config(config)
        assert dict(policy.methods) == {"/shop.Orders/Get": expected}


def test_retry_policy_becomes_retry_of_an_idempotent_method():
    policy = methods({"name": [ORDERS], "retryPolicy": RETRY}).policy_for("/shop.Orders/Get")
    assert policy.idempotent
    assert policy.retry.retry_on == {"UNAVAILABLE"}
    assert policy.retry.max_attempts == 4
    assert policy.retry.retry_budget is None


def test_more_than_five_attempts_count_as_five():
    assert retry_of(maxAttempts=9).max_attempts == 5
    hedging = methods({"name": [{}], "hedgingPolicy": {"maxAttempts": 9}}).hedging
    assert (hedging.max_attempts, hedging.delay, hedging.non_fatal_codes) == (5, 0.0, frozenset())


def test_hedging_policy_becomes_hedging_of_an_idempotent_method():
    given = {"maxAttempts": 3, "hedgingDelay": "0.5s", "nonFatalStatusCodes": ["INTERNAL", 14]}
    policy = methods({"name": [{}], "hedgingPolicy": given})
    assert policy.idempotent
    assert policy.hedging == HedgingPolicy(
        delay=0.5, max_attempts=3, non_fatal_codes={"INTERNAL", "UNAVAILABLE"}, retry_budget=None
    )


def test_retry_throttling_applies_to_all_retries_and_hedges():
    entries = (
        {"name": [GET], "retryPolicy": RETRY},
        {"name": [{}], "hedgingPolicy": {"maxAttempts": 2}},
    )
    throttling = {"maxTokens": 10, "tokenRatio": 0.1}
    policy = methods(*entries, retryThrottling=throttling)
    expected = RetryThrottling(max_tokens=10, token_ratio=0.1)
    assert policy.policy_for("/shop.Orders/Get").retry.retry_budget == expected
    assert policy.hedging.retry_budget == expected


def test_only_the_most_specific_entry_applies_to_a_method():
    policy = methods(
        {"name": [{}], "timeout": "1s", "waitForReady": True, "retryPolicy": RETRY},
        {"name": [ORDERS], "timeout": "2s"},
        {"name": [GET], "hedgingPolicy": {"maxAttempts": 2}},
    )
    assert of(policy, "/other.Service/Get")[:2] == (1.0, True)
    assert of(policy, "/other.Service/Get")[2].max_attempts == 4
    assert of(policy, "/shop.Orders/Put") == (2.0, None, None, None, False)
    assert of(policy, "/shop.Orders/Get")[:3] == (None, None, None)
    assert of(policy, "/shop.Orders/Get")[3:][1] is True


def test_names_match_precisely():
    policy = methods({"name": [ORDERS, {"service": "a.B", "method": "C"}], "timeout": "2s"})
    timeouts = {
        method: of(policy, method)[0]
        for method in ("/shop.Orders/Get", "/shop.OrdersX/Get", "/a.B/C", "/a.B/CD", "/x.a.B/C")
    }
    assert timeouts == dict(zip(timeouts, (2.0, None, 2.0, None, None), strict=True))


def test_null_and_an_empty_name_are_ignored():
    entries = ({"name": [{"service": "s", "method": None}], "timeout": None, "waitForReady": None},)
    policy = methods(*entries, {"name": [{"service": ""}], "timeout": "1s"}, retryThrottling=None)
    assert of(policy, "/s/M") == (None, None, None, None, False)
    assert of(policy, "/t/M")[0] == 1.0


@pytest.mark.parametrize(
    ("text", "seconds"), [("1s", 1.0), ("1.5s", 1.5), ("0.000000001s", 1e-9), ("3600s", 3600.0)]
)
def test_durations_are_seconds(text, seconds):
    assert of(methods({"name": [{}], "timeout": text}), "/s/M")[0] == seconds


@pytest.mark.parametrize("codes", [["UNAVAILABLE"], ["unavailable"], [14], ["Unavailable", 14]])
def test_status_codes_are_names_in_any_case_or_numbers(codes):
    assert retry_of(retryableStatusCodes=codes).retry_on == {"UNAVAILABLE"}


@given(
    attempt=st.integers(1, 5),
    initial=st.floats(0.001, 10),
    most=st.floats(0.001, 100),
    multiplier=st.floats(0.1, 10),
)
def test_the_backoff_is_exponential_and_varied_by_20_percent(attempt, initial, most, multiplier):
    settings = {"initialBackoff": f"{initial:.9f}s", "maxBackoff": f"{most:.9f}s"}
    backoff = retry_of(**settings, backoffMultiplier=multiplier).backoff
    seconds = backoff(failed_state(attempt, elapsed_ns=0, error=OSError()))
    expected = min(initial * multiplier ** (attempt - 1), most)
    assert 0.79 * expected <= seconds <= 1.21 * expected
    assert isinstance(backoff, tenacity.wait.wait_base)


def test_the_backoff_draws_nothing_from_the_generator_of_the_program():
    state = random.getstate()
    retry_of().backoff(failed_state(1, elapsed_ns=0, error=OSError()))
    assert random.getstate() == state


def refused(config, *said):
    with pytest.raises(ConfigurationError) as caught:
        policy_from_service_config(config)
    assert [one for one in said if one not in str(caught.value)] == [], str(caught.value)


def test_a_file_is_named_in_errors(file, tmp_path):
    refused("[" * 100_000, "service config: not valid JSON")
    refused(tmp_path / "none.json", f"{tmp_path / 'none.json'}: it can't be read")
    path = file('{"methodConfig": 3}', "config.json")
    refused(path, f"{path}: methodConfig: ")


def test_each_mistake_has_a_line_and_the_first_20_are_listed():
    entries = [{"name": [{"service": f"s{one}"}], "timeout": "5"} for one in range(3000)]
    with pytest.raises(ConfigurationError) as caught:
        policy_from_service_config({"methodConfig": entries})
    lines = str(caught.value).splitlines()
    assert caught.value.problems == tuple(lines)
    assert [line.partition(": it must be")[0] for line in lines] == [
        *(f"service config: methodConfig[{one}].timeout" for one in range(20)),
        "and 2,980 more",
    ]


def test_a_warning_names_the_keys_that_are_not_applied():
    config = {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": "shop"},
        "methodConfig": [
            {"name": [{}], "timeout": "1s"},
            {
                "name": [ORDERS],
                "maxRequestMessageBytes": 1024,
                "retryPolicy": RETRY | {"perAttemptRecvTimeout": "1s"},
            },
        ],
    }
    names = (
        "loadBalancingConfig, healthCheckConfig, methodConfig[1].maxRequestMessageBytes, "
        "methodConfig[1].retryPolicy.perAttemptRecvTimeout; "
    )
    with pytest.warns(UserWarning, match=re.escape(f"does not apply {names}")) as caught:
        policy = policy_from_service_config(config)
    assert len(caught) == 1
    assert of(policy, "/a/b")[0] == 1.0
