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
    policy = FailbackPolicy(retry_on=OSError)
    assert policy.max_attempts == policy.limit == 4
    assert policy.backoff == 5.0
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
        "retry_on": {grpc.StatusCode.UNAVAILABLE, ConnectionError},
        "max_attempts": 9,
        "backoff": timedelta(seconds=1),
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
    with pytest.raises(AttributeError, match=r"policy\.replace\(max_attempts="):
        FailbackPolicy(retry_on=OSError).max_attempts = 5


def test_a_stop_replaces_the_default_of_max_attempts_but_not_what_was_written():
    for settings, limit in [
        ({}, 4),
        ({"max_attempts": None}, None),
        ({"max_attempts": 1}, 1),
        ({"stop": tenacity.stop_after_delay(60)}, None),
        ({"stop": tenacity.stop_after_delay(60), "max_attempts": 4}, 4),
    ]:
        assert FailbackPolicy(retry_on=OSError, **settings).limit == limit


def test_without_on_the_message_says_what_to_give():
    with pytest.raises(ConfigurationError, match=r"`retry_on` is missing; say which .*StatusCode"):
        FailbackPolicy()


def test_an_unknown_setting_is_refused_with_the_nearest_one():
    with pytest.raises(
        ConfigurationError, match=r"no setting 'attempts'; did you mean 'max_attempts'\?"
    ):
        FailbackPolicy(retry_on=OSError, attempts=3)
    with pytest.raises(
        ConfigurationError, match=r"no setting 'xyz'; there are retry_on, max_attempts,"
    ):
        FailbackPolicy(retry_on=OSError, xyz=3)


def test_a_value_out_of_range_is_refused_with_what_is_allowed():
    for settings, said in [
        ({"retry_on": []}, "`retry_on` is empty"),
        ({"retry_on": "UNAVAILBLE"}, "did you mean 'UNAVAILABLE'?"),
        ({"max_attempts": 0}, "max_attempts: it must be greater than or equal to 1, not 0"),
        ({"max_pending": 0}, "max_pending: it must be greater than or equal to 1, not 0"),
        ({"backoff": -1}, "wait must not be negative"),
        ({"backoff": float("nan")}, "wait is NaN"),
        ({"overflow": "wait"}, "overflow: it must be 'raise' or 'drop', not 'wait'"),
        ({"name": ""}, "name: "),
    ]:
        with pytest.raises(ConfigurationError, match=re.escape(said)):
            FailbackPolicy(**{"retry_on": OSError} | settings)


def test_a_value_of_a_wrong_type_is_a_type_error_that_says_what_to_give():
    for settings, said in [
        ({"retry_on": 14}, "`retry_on` holds 14; say which errors"),
        ({"max_attempts": "3"}, "max_attempts: it must be a valid integer, not '3'"),
        ({"max_attempts": True}, "max_attempts: it must be a valid integer, not True"),
        ({"max_pending": 1.5}, "max_pending: it must be a valid integer, not 1.5"),
        ({"max_pending": None}, "max_pending: it must be a valid integer, not None"),
        ({"backoff": None}, "wait must be seconds"),
        ({"backoff": "5"}, "wait must be seconds"),
        ({"backoff": True}, "wait must be seconds"),
        ({"stop": 3}, "stop must be None or a tenacity stop object"),
        ({"name": 5}, "name: it must be a valid string, not 5"),
        (
            {"metadata": "trace-id"},
            "metadata: it must be a tuple or a list, such as ('trace-id',) (in a file",
        ),
        ({"metadata": None}, "metadata: it must be a tuple or a list, such as"),
        ({"metadata": [5]}, "metadata[0]: it must be a valid string, not 5"),
        ({"dead_letter": "log"}, "dead_letter: it must be callable, not 'log'"),
    ]:
        with pytest.raises(TypeError, match=re.escape(said)):
            FailbackPolicy(**{"retry_on": OSError} | settings)


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
        policy = FailbackPolicy(retry_on=OSError, metadata=patterns)
        keys = ("trace-id", "trace-bin", "user", "auth", "authorization")
        assert {key for key in keys if policy.keeps(key)} == kept


JOURNAL = "sqlite:///var/lib/shop/failback.db"


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (("*",), {"trace-id", "user"}),
        (("user", "x-api-key", "authorization", "cookie"), {"user", "x-api-key"}),
        (("x-*",), set()),
    ],
)
def test_a_journal_has_no_credentials_and_what_may_be_secret_only_by_its_full_name(patterns, kept):
    policy = FailbackPolicy(retry_on=OSError, metadata=patterns, journal=JOURNAL)
    secret = ("x-api-key", "x-auth-token", "my-session", "authorization", "cookie")
    keys = ("trace-id", "user", "idempotency-key", *secret)
    assert {key for key in keys if policy.keeps(key)} == kept


def test_which_metadata_may_be_secret():
    policy = FailbackPolicy(retry_on=OSError, journal=JOURNAL)
    secret = {
        *("x-private-id", "x-passphrase", "x-access-key", "signing_key", "enc-key-bin", "otp"),
        *("x-otp-code", "card_pin", "x-ms-client-principal", "x-amzn-oidc-data", "x-api_key-id"),
    }
    public = {
        *("x-shipping", "x-opinion", "x-hotpath", "x-monkey", "key", "x-key-id", "x-partition-key"),
        *("x-idempotency-key", "x-principal", "tenant-bin"),
    }
    assert {key for key in secret | public if policy.keeps(key)} == public


def test_the_password_of_a_journal_is_not_in_the_representation_of_a_policy():
    policy = FailbackPolicy(retry_on=OSError, journal="redis://user:secret@127.0.0.1:6379")
    assert "secret" not in repr(policy)
    with pytest.raises(ConfigurationError) as caught:
        FailbackPolicy(retry_on=OSError, journal="reddis://user:secret@127.0.0.1:6379")
    assert "secret" not in str(caught.value)


def test_with_a_journal_other_limits_apply_unless_they_are_set():
    policy = FailbackPolicy(retry_on=OSError, journal=JOURNAL)
    assert (policy.limit, policy.capacity, policy.max_age) == (None, 1_000_000, 86_400.0)
    policy = policy.replace(max_attempts=4, max_pending=100)
    assert (policy.limit, policy.capacity) == (4, 100)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"journal": "sqlit:///a.db"}, "journal: .* did you mean sqlite://"),
        ({"journal": "a.db"}, "journal: .*is not the URL of a journal"),
        ({"journal": 5}, "journal: "),
        ({"max_age": 5.0}, "max_age: has an effect only with `journal`"),
        ({"order_key": "user"}, "order_key: has an effect only with `journal`"),
        ({"target": "orders:50051"}, "target: has an effect only with `journal`"),
        ({"journal": JOURNAL, "max_age": 0}, "max_age: "),
        ({"journal": JOURNAL, "order_key": 5}, "order_key"),
    ],
)
def test_wrong_settings_of_journals_are_refused(settings, problem):
    with pytest.raises((ConfigurationError, TypeError), match=problem):
        FailbackPolicy(retry_on=OSError, **settings)


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigurationError, match=r"wait is NaN.*\nmax_pending: "):
        FailbackPolicy(retry_on=OSError, backoff=float("nan"), max_pending=0)


def test_a_policy_inside_another_model_is_checked_as_a_part_of_it():
    class Config(pydantic.BaseModel):
        failback: FailbackPolicy

    with pytest.raises(pydantic.ValidationError, match="failback"):
        Config(failback={"retry_on": "UNAVAILABLE", "max_attempts": 0})
    assert Config(failback={"retry_on": "UNAVAILABLE", "max_attempts": 8}).failback.limit == 8
