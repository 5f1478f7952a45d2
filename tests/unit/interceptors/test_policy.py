"""One policy for all calls and others for some: what holds for which method, and what can't be."""

import copy
import pickle
import re
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcwheel import interceptors
from rpcwheel.deadline import DeadlinePolicy, RetryPolicy
from rpcwheel.errors import ConfigurationError
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import CallPolicy, FailsafePolicy, MethodPolicy
from rpcwheel.methods import matches

SAFE = RetryPolicy(on="UNAVAILABLE")
UNSAFE = RetryPolicy(on=["INTERNAL", "ABORTED"])
FAILSAFE = FailsafePolicy(on="UNAVAILABLE", default=b"sorry")
FAILBACK = FailbackPolicy(on="UNAVAILABLE")
IDEMPOTENT = MethodPolicy(idempotent=True)


def refused(said: str, *, error: type[Exception] = ConfigurationError):
    return pytest.raises(error, match=re.escape(said))


def test_by_default_nothing_is_switched_on():
    policy = CallPolicy()
    assert (policy.timeout, policy.retry, policy.failsafe, policy.failback) == (None,) * 4
    assert policy.idempotent is False
    assert policy.methods == {}
    assert policy.of("/shop.Orders/Get") == MethodPolicy()


@pytest.mark.parametrize(
    "timeout", [2.0, timedelta(seconds=2), DeadlinePolicy(timeout=2.0), {"timeout": 2}]
)
def test_a_plain_time_is_the_timeout(timeout):
    seconds = CallPolicy(timeout=timeout).of("/a/b").timeout.timeout
    assert seconds in {2.0, timedelta(seconds=2)}


@pytest.mark.parametrize(
    ("timeout", "said", "error"),
    [
        ("2", "timeout: it must be seconds", TypeError),
        (True, "timeout: it must be seconds", TypeError),
        (0, "timeout: it must be a finite time above zero", ConfigurationError),
        (float("inf"), "for no limit leave it out, or give None", ConfigurationError),
        ({"timeout": 2, "slow_after": 3}, "slow_after (3.0) would never", ConfigurationError),
        ({"timout": 2}, "timeout: there is no setting 'timout'; did you mean", ConfigurationError),
    ],
)
def test_a_timeout_that_is_none_is_refused(timeout, said, error):
    with refused(said, error=error):
        CallPolicy(timeout=timeout)


def test_a_retry_that_is_no_policy_is_refused_with_what_to_give():
    with refused("instance of RetryPolicy, not {'UNAVAILABLE'}", error=TypeError):
        CallPolicy(retry={"UNAVAILABLE"})


def test_what_a_failsafe_matches_is_checked_as_for_failback():
    with refused("`on` is missing; say which errors"):
        FailsafePolicy()
    with refused("did you mean 'UNAVAILABLE'?"):
        CallPolicy(methods={"*": {"failsafe": {"on": ["UNAVAILBLE"]}}})
    with refused("`on` holds 14", error=TypeError):
        FailsafePolicy(on=14)


def test_a_pattern_without_its_slash_is_refused_with_the_one_that_was_meant():
    with refused(
        """methods["shop.Orders/*"]: 'shop.Orders/*' names no methods; did you mean '/shop"""
    ):
        CallPolicy(methods={"shop.Orders/*": IDEMPOTENT})
    with refused("methods: Input should be a valid dictionary", error=TypeError):
        CallPolicy(methods=None)


# Which policy holds


def test_a_name_goes_before_a_pattern_and_a_longer_pattern_before_a_shorter_one():
    methods = {
        "/shop.Orders/Get": MethodPolicy(timeout=1.0),
        "/shop.Orders/Get*": MethodPolicy(timeout=1.5),
        "/shop.Orders/G*": MethodPolicy(timeout=2.0),
        "/shop.*/*": MethodPolicy(timeout=3.0),
        "*": MethodPolicy(timeout=4.0),
    }
    for given_methods in (methods, dict(reversed(methods.items()))):
        policy = CallPolicy(timeout=5.0, methods=given_methods)
        called = ["/shop.Orders/Get", "/shop.Orders/Gut", "/shop.Orders/Put", "/a/b"]
        assert [policy.of(name).timeout.timeout for name in called] == [1.0, 2.0, 3.0, 4.0]


def test_of_two_patterns_that_say_as_much_the_later_one_holds():
    one, other = (
        ("/shop.A/*b", MethodPolicy(timeout=1.0)),
        ("/shop.A/b*", MethodPolicy(timeout=2.0)),
    )
    assert CallPolicy(methods=dict([one, other])).of("/shop.A/bb").timeout.timeout == 2.0
    assert CallPolicy(methods=dict([other, one])).of("/shop.A/bb").timeout.timeout == 1.0


def test_a_method_keeps_what_its_own_policy_does_not_set():
    policy = CallPolicy(timeout=2.0, retry=SAFE, methods={"/a/*": IDEMPOTENT})
    assert policy.of("/a/b") == MethodPolicy(timeout=2.0, retry=SAFE, idempotent=True)
    assert policy.of("/a/b").retry is SAFE
    assert policy.of("/x/y") == MethodPolicy(timeout=2.0, retry=SAFE)


def test_none_switches_off_what_is_on_for_all():
    off = MethodPolicy(timeout=None, retry=None, failback=None)
    policy = CallPolicy(timeout=2.0, retry=SAFE, failback=FAILBACK, methods={"/a/*": off})
    assert policy.of("/a/b") == MethodPolicy()
    assert policy.of("/x/y").failback is FAILBACK


def test_another_timeout_for_a_method_changes_nothing_else_of_its_deadline():
    general = DeadlinePolicy(timeout=10.0, slow_after=5.0, message_timeout=1.0, propagate=False)
    policy = CallPolicy(timeout=general, methods={"/a/*": MethodPolicy(timeout=3.0)})
    assert policy.of("/a/b").timeout == DeadlinePolicy(
        timeout=3.0, message_timeout=1.0, slow_after=None, propagate=False
    )


@pytest.mark.parametrize(
    ("general", "own"),
    [
        ({"failsafe": FAILSAFE}, {"failback": FAILBACK}),
        ({"failback": FAILBACK}, {"failsafe": FAILSAFE}),
    ],
)
def test_the_answer_of_the_more_specific_policy_replaces_the_other_kind(general, own):
    policy = CallPolicy(**general, methods={"/a/*": MethodPolicy(**own)})
    assert policy.of("/a/b") == MethodPolicy(**own)
    assert policy.of("/x/y") == MethodPolicy(**general)


patterns = st.sampled_from(["*", "/a/*", "/*/b", "/a/b", "/a/b*", "/a*/bc", "/ab/*", "/ab/bc"])
settings = st.fixed_dictionaries(
    {},
    optional={
        "timeout": st.sampled_from([None, 1.0, 2.0]),
        "retry": st.sampled_from([None, SAFE, RetryPolicy(on="UNAVAILABLE", attempts=5)]),
        "idempotent": st.booleans(),
    },
)


@given(settings, st.dictionaries(patterns, settings), st.sampled_from(["/a/b", "/ab/bc", "/a/bc"]))
def test_each_setting_is_that_of_the_most_specific_policy_that_has_it(general, methods, method):
    policy = CallPolicy(
        **general, methods={name: MethodPolicy(**own) for name, own in methods.items()}
    )
    naming = [name for name in methods if matches(name, method)]
    naming.sort(key=lambda name: (name == method, len(name.replace("*", ""))))
    expected = dict(general)
    for name in naming:
        expected |= methods[name]
    assert policy.of(method) == MethodPolicy(**expected)


answers = st.fixed_dictionaries(
    {},
    optional={
        "failsafe": st.sampled_from([None, FAILSAFE]),
        "failback": st.sampled_from([None, FAILBACK]),
        "timeout": st.builds(
            DeadlinePolicy,
            timeout=st.sampled_from([None, 3.0, 9.0]),
            slow_after=st.sampled_from([None, 1.0, 2.0]),
        ),
    },
).filter(lambda given: not (given.get("failsafe") and given.get("failback")))


@given(answers, answers, answers)
def test_policies_that_meet_at_a_method_never_contradict_each_other(general, one, other):
    found = MethodPolicy(**one).over(MethodPolicy(**other).over(MethodPolicy(**general)))
    assert not (found.failsafe and found.failback)
    for name in ("failsafe", "failback", "timeout"):
        if one.get(name) is not None:
            assert getattr(found, name) is not None


# What can't be


@pytest.mark.parametrize("policy", [MethodPolicy, CallPolicy])
def test_failsafe_and_failback_in_one_place_are_a_contradiction(policy):
    with refused("failsafe forgets it, failback delivers it later; choose one"):
        policy(failsafe=FAILSAFE, failback=FAILBACK)


@pytest.mark.parametrize(
    "settings",
    [
        {"retry": UNSAFE, "idempotent": True},
        {"retry": UNSAFE, "methods": {"/a/Get*": IDEMPOTENT}},
        {"idempotent": True, "methods": {"/a/*": MethodPolicy(retry=UNSAFE)}},
        {"methods": {"/a/*": MethodPolicy(retry=UNSAFE, idempotent=True)}},
        {"methods": {"/a/*": MethodPolicy(retry=UNSAFE), "/a/Get*": IDEMPOTENT}},
        {"methods": {"/a/Get*": IDEMPOTENT, "/a/*All": MethodPolicy(retry=UNSAFE)}},
        {"methods": {"/a/*": IDEMPOTENT, "/a/Get": MethodPolicy(retry=UNSAFE)}},
        {"retry": RetryPolicy(on=["INTERNAL", "UNAVAILABLE"])},
    ],
)
def test_a_retry_after_any_code_is_allowed_where_some_method_it_is_for_is_idempotent(settings):
    assert CallPolicy(**settings)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"retry": UNSAFE}, "retry: "),
        ({"retry": UNSAFE, "methods": {"/a/Get*": MethodPolicy(timeout=1)}}, "retry: "),
        (
            {"retry": UNSAFE, "methods": {"/a/*": MethodPolicy(retry=SAFE, idempotent=True)}},
            "retry",
        ),
        ({"methods": {"/a/*": MethodPolicy(retry=UNSAFE)}}, 'methods["/a/*"].retry: '),
        ({"methods": {"/a/*": MethodPolicy(retry=UNSAFE), "/b/*": IDEMPOTENT}}, 'methods["/a/*"]'),
        (
            {"idempotent": True, "methods": {"/a/*": MethodPolicy(retry=UNSAFE, idempotent=False)}},
            'methods["/a/*"].retry: ',
        ),
        (
            {"methods": {"/a/*": IDEMPOTENT, "/a/b": {"retry": UNSAFE, "idempotent": False}}},
            'methods["/a/b"].retry: ',
        ),
    ],
)
def test_a_retry_that_no_method_could_ever_get_is_a_contradiction(settings, where):
    with refused(f"{where}") as caught:
        CallPolicy(**settings)
    assert "calls that failed with ABORTED, INTERNAL may have been carried out" in str(caught.value)
    assert 'methods={"/shop.Orders/Get*": MethodPolicy(idempotent=True)}' in str(caught.value)


def test_a_server_that_is_overloaded_may_have_begun_so_retries_after_that_are_for_idempotent_ones():
    on = RetryPolicy(on="RESOURCE_EXHAUSTED")
    with refused("calls that failed with RESOURCE_EXHAUSTED may have been carried out"):
        CallPolicy(retry=on)
    assert CallPolicy(retry=on, idempotent=True)


@pytest.mark.parametrize("name", ["attempt_timeout", "wait"])
def test_a_retry_that_takes_as_long_as_the_whole_call_is_a_contradiction(name):
    slow = RetryPolicy(on="UNAVAILABLE", **{name: 2.0})
    said = f"retry: {name} (2.0) leaves no time for another attempt, as timeout (2.0)"
    with refused(said):
        CallPolicy(timeout=2.0, retry=slow)
    with refused('methods["/a/*"].' + said):
        CallPolicy(timeout=2.0, methods={"/a/*": MethodPolicy(retry=slow)})
    assert CallPolicy(timeout=2.1, retry=slow)
    assert CallPolicy(retry=slow, methods={"/a/*": MethodPolicy(timeout=1.0)})
    assert CallPolicy(timeout=2.0, retry=slow.model_copy(update={"attempts": 1}))


def test_a_method_s_limit_that_the_general_timeout_never_reaches_is_a_contradiction():
    silent = MethodPolicy(timeout=DeadlinePolicy(message_timeout=5.0))
    with refused('methods["/a/*"].timeout: message_timeout (5.0) would never be reached'):
        CallPolicy(timeout=2.0, methods={"/a/*": silent})
    assert CallPolicy(methods={"/a/*": silent}).of("/a/b").timeout.message_timeout == 5.0


def test_all_contradictions_are_said_at_once():
    with pytest.raises(ConfigurationError, match=r"leaves no time.*; retry: calls that failed"):
        CallPolicy(timeout=1.0, retry=RetryPolicy(on="INTERNAL", wait=5.0))


# A value like others


def test_the_policies_of_methods_do_not_change():
    for policy in (CallPolicy(), CallPolicy(methods={"/a/b": IDEMPOTENT})):
        with pytest.raises(TypeError, match="a policy does not change; make another one"):
            policy.methods["/a/*"] = IDEMPOTENT
        with pytest.raises(TypeError, match="make another one"):
            policy.methods.update({"/a/*": IDEMPOTENT})
    mine = {"/a/b": IDEMPOTENT}
    policy = CallPolicy(methods=mine)
    mine.clear()
    assert policy.of("/a/b").idempotent


def test_a_policy_can_be_copied_pickled_and_dumped():
    policy = CallPolicy(timeout=2.0, methods={"/a/b": IDEMPOTENT})
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy
    assert policy.model_dump(exclude_unset=True) == {
        "timeout": {"timeout": 2.0},
        "methods": {"/a/b": {"idempotent": True}},
    }


WRONG = {
    "a policy as a dict": ({"timeout": 2}, {}, r"CallPolicy\(timeout=2\.0\), not \{'timeout': 2\}"),
    "a number": (2, {}, "policy must be a CallPolicy"),
    "no timer": (CallPolicy(), {"timer": 3}, "timer must be a WheelTimer"),
}


@pytest.mark.parametrize(("policy", "others", "said"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("world", [interceptors, interceptors.aio], ids=["sync", "aio"])
@pytest.mark.parametrize("side", ["client_interceptors", "server_interceptors"])
def test_what_is_no_policy_or_timer_is_refused_where_it_is_given(world, side, policy, others, said):
    with pytest.raises(TypeError, match=said):
        getattr(world, side)(policy, **others)


@pytest.mark.parametrize("world", [interceptors, interceptors.aio], ids=["sync", "aio"])
def test_queues_are_those_of_this_world(world):
    with pytest.raises(TypeError, match="queues must be a Queues, or None, not 3"):
        world.client_interceptors(CallPolicy(), queues=3)
