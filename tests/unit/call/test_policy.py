"""`CallPolicy`: which settings apply to which method."""

import copy
import itertools
import pickle
import sys
from datetime import timedelta

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcwheel.call import (
    CallPolicy,
    Criticality,
    DeadlinePolicy,
    DefaultResponsePolicy,
    MethodPolicy,
    RetryPolicy,
)
from rpcwheel.errors import ConfigurationError
from rpcwheel.failback import FailbackPolicy
from rpcwheel.methods import matches

SAFE = RetryPolicy(retry_on="UNAVAILABLE")
SLOW = RetryPolicy(retry_on="UNAVAILABLE", backoff=5.0)
DEFAULT_RESPONSE = DefaultResponsePolicy(on="UNAVAILABLE", default=b"sorry")
FAILBACK = FailbackPolicy(retry_on="UNAVAILABLE")
IDEMPOTENT = MethodPolicy(idempotent=True)


def test_a_number_is_the_timeout():
    for timeout in (2.0, timedelta(seconds=2), DeadlinePolicy(timeout=2.0), {"timeout": 2}):
        seconds = CallPolicy(timeout=timeout).policy_for("/a/b").timeout.timeout
        assert seconds in {2.0, timedelta(seconds=2)}


@pytest.mark.parametrize(
    "on",
    [
        "UNAVAILABLE",
        grpc.StatusCode.UNAVAILABLE,
        ["UNAVAILABLE"],
        {grpc.StatusCode.UNAVAILABLE},
        ("UNAVAILABLE", grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_codes_may_be_names_or_members_of_grpcs_enum(on):
    assert RetryPolicy(retry_on=on).retry_on == {"UNAVAILABLE"}


@pytest.mark.parametrize("name", ["message_timeout", "slow_call_threshold"])
@pytest.mark.parametrize("part", [2.0, timedelta(seconds=3)])
def test_a_limit_may_be_shorter_than_the_timeout(name, part):
    assert getattr(DeadlinePolicy(timeout=3.1, **{name: part}), name) == part


def test_settings_that_are_not_set_are_inherited():
    general = DeadlinePolicy(
        timeout=10, message_timeout=2, slow_call_threshold=5, propagate_deadline=False
    )
    assert DeadlinePolicy(slow_call_threshold=1).over(general) == DeadlinePolicy(
        timeout=10, message_timeout=2, slow_call_threshold=1, propagate_deadline=False
    )
    assert DeadlinePolicy(message_timeout=None).over(general).message_timeout is None
    assert DeadlinePolicy(slow_call_threshold=1).over(None) == DeadlinePolicy(slow_call_threshold=1)


# Which policy holds


def test_none_switches_off_a_policy_of_all_methods():
    off = MethodPolicy(timeout=None, retry=None, failback=None)
    policy = CallPolicy(timeout=2.0, retry=SAFE, failback=FAILBACK, methods={"/a/*": off})
    assert policy.policy_for("/a/b") == MethodPolicy()
    assert policy.policy_for("/x/y").failback is FAILBACK


def test_none_switches_off_no_other_policy():
    policy = CallPolicy(hedging=0.1, methods={"/a/*": MethodPolicy(retry=None, failback=None)})
    assert policy.policy_for("/a/b").hedging == policy.hedging


def test_another_timeout_for_a_method_changes_nothing_else_of_its_deadline():
    general = DeadlinePolicy(
        timeout=10.0, slow_call_threshold=5.0, message_timeout=1.0, propagate_deadline=False
    )
    policy = CallPolicy(timeout=general, methods={"/a/*": MethodPolicy(timeout=3.0)})
    assert policy.policy_for("/a/b").timeout == DeadlinePolicy(
        timeout=3.0, message_timeout=1.0, slow_call_threshold=None, propagate_deadline=False
    )


def test_failback_switches_off_the_retry_of_a_more_general_policy():
    own = MethodPolicy(failback=FAILBACK, idempotent=True)
    policy = CallPolicy(
        retry=SAFE,
        idempotent=True,
        methods={
            "/a/*": own,
            "/a/c": MethodPolicy(timeout=1.0),
            "/a/d": MethodPolicy(retry=SAFE),
            "/b/*": MethodPolicy(failback=FAILBACK, retry=SAFE),
        },
    )
    assert policy.policy_for("/a/b").retry is policy.policy_for("/a/c").retry is None
    assert (
        policy.policy_for("/a/d").retry
        == policy.policy_for("/b/b").retry
        == policy.policy_for("/x/y").retry
        == SAFE
    )
    assert CallPolicy(retry=SAFE, failback=FAILBACK).policy_for("/x/y").retry == SAFE


RETRIED, HEDGED = MethodPolicy(retry=SAFE), MethodPolicy(hedging=0.1)
ANSWERED = MethodPolicy(default_response=DEFAULT_RESPONSE)
QUEUED = MethodPolicy(failback=FAILBACK)


@pytest.mark.parametrize(
    ("other", "own"),
    [(RETRIED, HEDGED), (HEDGED, RETRIED), (ANSWERED, QUEUED), (QUEUED, ANSWERED)],
)
def test_policies_of_a_method_that_exclude_each_other_replace_each_other(other, own):
    assert CallPolicy(methods={"*": other, "/a/*": own}).policy_for("/a/b") == own


patterns = st.sampled_from(["*", "/a/*", "/*/b", "/a/b", "/a/b*", "/a*/bc", "/ab/*", "/ab/bc"])
settings = st.fixed_dictionaries(
    {},
    optional={
        "timeout": st.sampled_from([None, 1.0, 2.0]),
        "retry": st.sampled_from([None, SAFE, RetryPolicy(retry_on="UNAVAILABLE", max_attempts=5)]),
        "idempotent": st.booleans(),
        "criticality": st.sampled_from([None, *Criticality]),
    },
)


@given(settings, st.dictionaries(patterns, settings), st.sampled_from(["/a/b", "/ab/bc", "/a/bc"]))
def test_each_setting_comes_from_the_most_specific_policy_that_sets_it(general, methods, method):
    policy = CallPolicy(
        **general, methods={name: MethodPolicy(**own) for name, own in methods.items()}
    )
    naming = [name for name in methods if matches(name, method)]
    naming.sort(key=lambda name: (name == method, len(name.replace("*", ""))))
    expected = dict(general)
    for name in naming:
        expected |= methods[name]
    assert policy.policy_for(method) == MethodPolicy(**expected)


def test_limits_within_the_timeout_are_accepted():
    slow = RetryPolicy(retry_on="UNAVAILABLE", backoff=4.0)
    silent = MethodPolicy(timeout=DeadlinePolicy(message_timeout=5.0))
    for settings in (
        {"timeout": 2.1, "retry": slow},
        {"retry": slow, "methods": {"/a/*": MethodPolicy(timeout=1.0)}},
        {"timeout": 2.0, "retry": slow.model_copy(update={"max_attempts": 1})},
    ):
        assert CallPolicy(**settings)
    assert CallPolicy(methods={"/a/*": silent}).policy_for("/a/b").timeout.message_timeout == 5.0


def test_a_backoff_that_no_float_can_hold_is_refused_as_any_that_is_too_long():
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=10**400)
    with pytest.raises(ConfigurationError, match="leaves no time for another attempt"):
        CallPolicy(timeout=5.0, retry=retry)


# A value like others


def test_the_policies_of_methods_do_not_change():
    mine = {"/a/b": IDEMPOTENT}
    policy = CallPolicy(methods=mine)
    mine.clear()
    assert policy.policy_for("/a/b").idempotent


def test_a_policy_can_be_copied_pickled_hashed_and_dumped():
    policy = CallPolicy(timeout=2.0, methods={"/a/b": IDEMPOTENT})
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy
    assert {policy, copy.deepcopy(policy)} == {policy}
    assert policy.model_dump(exclude_unset=True) == {
        "timeout": {"timeout": 2.0},
        "methods": {"/a/b": {"idempotent": True}},
    }


@pytest.mark.parametrize("form", ["/shop.S{}/Get", "/shop.S{}/*", "/shop.S*/Get{}", "/*{}/*"])
def test_the_cost_of_a_policy_grows_in_proportion_to_its_patterns(form):
    def count_calls(number):
        methods = {form.format(1000 + one): MethodPolicy(retry=SLOW) for one in range(number)}
        calls = itertools.count()
        before = sys.getprofile()
        sys.setprofile(lambda *_: next(calls))
        try:
            CallPolicy(timeout=60.0, methods=methods)
        finally:
            sys.setprofile(before)
        return next(calls)

    assert count_calls(800) < 3 * count_calls(400)
