"""What a user may set, and how wrong settings are refused."""

import re
from datetime import timedelta

import grpc
import pydantic
import pytest
import tenacity

from rpcwheel.errors import ConfigurationError
from rpcwheel.failback import FailbackPolicy


def test_the_defaults_are_those_of_dubbo():
    policy = FailbackPolicy(on=OSError)
    assert policy.retries == policy.limit == 3
    assert policy.wait == 5.0
    assert policy.stop is None
    assert policy.default is None
    assert policy.max_pending == 100
    assert policy.overflow == "raise"
    assert policy.metadata == ("*",)
    assert policy.name is None
    assert policy.dead_letter is None


def test_every_setting_is_kept_as_given():
    default, stop = object(), tenacity.stop_after_delay(60)
    settings = {
        "on": {grpc.StatusCode.UNAVAILABLE, ConnectionError},
        "retries": 8,
        "wait": timedelta(seconds=1),
        "stop": stop,
        "default": default,
        "max_pending": 5,
        "overflow": "drop",
        "metadata": ("trace-*", "authorization"),
        "name": "audit",
        "dead_letter": print,
    }
    policy = FailbackPolicy(**settings)
    assert {name: getattr(policy, name) for name in settings} == settings
    assert policy.default is default


def test_a_policy_does_not_change():
    with pytest.raises(AttributeError, match=r"policy\.changed\(retries="):
        FailbackPolicy(on=OSError).retries = 5


def test_a_stop_replaces_the_default_of_retries_but_not_what_was_written():
    for settings, limit in [
        ({}, 3),
        ({"retries": None}, None),
        ({"retries": 0}, 0),
        ({"stop": tenacity.stop_after_delay(60)}, None),
        ({"stop": tenacity.stop_after_delay(60), "retries": 3}, 3),
    ]:
        assert FailbackPolicy(on=OSError, **settings).limit == limit


def test_without_on_the_message_says_what_to_give():
    with pytest.raises(ConfigurationError, match=r"`on` is missing; say which .*StatusCode"):
        FailbackPolicy()


def test_an_unknown_setting_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigurationError, match=r"no setting 'retry'; did you mean 'retries'\?"):
        FailbackPolicy(on=OSError, retry=3)
    with pytest.raises(
        ConfigurationError, match=r"no setting 'xyz'; there are on, retries, wait, stop,"
    ):
        FailbackPolicy(on=OSError, xyz=3)


def test_a_value_out_of_range_is_refused_with_what_is_allowed():
    for settings, said in [
        ({"on": []}, "`on` is empty"),
        ({"on": "UNAVAILBLE"}, "did you mean 'UNAVAILABLE'?"),
        ({"retries": -1}, "retries: Input should be greater than or equal to 0, not -1"),
        ({"max_pending": 0}, "max_pending: Input should be greater than or equal to 1, not 0"),
        ({"wait": -1}, "wait must not be negative"),
        ({"wait": float("nan")}, "wait is NaN"),
        ({"overflow": "wait"}, "overflow: Input should be 'raise' or 'drop', not 'wait'"),
        ({"name": ""}, "name: "),
    ]:
        with pytest.raises(ConfigurationError, match=re.escape(said)):
            FailbackPolicy(**{"on": OSError} | settings)


def test_a_value_of_a_wrong_type_is_a_type_error_that_says_what_to_give():
    for settings, said in [
        ({"on": 14}, "`on` holds 14; say which errors"),
        ({"retries": "3"}, "retries: Input should be a valid integer, not '3'"),
        ({"retries": True}, "retries: Input should be a valid integer, not True"),
        ({"max_pending": 1.5}, "max_pending: Input should be a valid integer, not 1.5"),
        ({"max_pending": None}, "max_pending: Input should be a valid integer, not None"),
        ({"wait": None}, "wait must be seconds"),
        ({"wait": "5"}, "wait must be seconds"),
        ({"wait": True}, "wait must be seconds"),
        ({"stop": 3}, "stop must be None or a tenacity stop object"),
        ({"name": 5}, "name: Input should be a valid string, not 5"),
        (
            {"metadata": "trace-id"},
            "metadata: it must be a tuple or a list, such as ('trace-id',) (in a file",
        ),
        ({"metadata": None}, "metadata: it must be a tuple or a list, such as"),
        ({"metadata": [5]}, 'metadata["0"]: Input should be a valid string, not 5'),
        ({"dead_letter": "log"}, "dead_letter: Input should be callable, not 'log'"),
    ]:
        with pytest.raises(TypeError, match=re.escape(said)):
            FailbackPolicy(**{"on": OSError} | settings)


def test_the_metadata_that_is_sent_again_is_what_is_named_and_a_token_only_in_full():
    for patterns, kept in [
        (("*",), {"trace-id", "trace-bin", "user", "auth"}),
        (["*"], {"trace-id", "trace-bin", "user", "auth"}),
        ((), set()),
        (("trace-*",), {"trace-id", "trace-bin"}),
        (("user", "trace-bin"), {"user", "trace-bin"}),
        (("auth*",), {"auth"}),
        (("authorization",), {"authorization"}),
        (("*", "authorization"), {"trace-id", "trace-bin", "user", "auth", "authorization"}),
        (("USER",), set()),
    ]:
        policy = FailbackPolicy(on=OSError, metadata=patterns)
        keys = ("trace-id", "trace-bin", "user", "auth", "authorization")
        assert {key for key in keys if policy.keeps(key)} == kept


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigurationError, match=r"wait is NaN.*; max_pending: "):
        FailbackPolicy(on=OSError, wait=float("nan"), max_pending=0)


def test_a_policy_inside_another_model_is_checked_as_a_part_of_it():
    class Config(pydantic.BaseModel):
        failback: FailbackPolicy

    with pytest.raises(pydantic.ValidationError, match="failback"):
        Config(failback={"on": "UNAVAILABLE", "retries": -1})
    assert Config(failback={"on": "UNAVAILABLE", "retries": 7}).failback.limit == 7
