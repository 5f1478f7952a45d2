"""What a user may set, and how wrong settings are refused."""

from functools import partial

import pydantic
import pytest
import tenacity

from fixtures.refusals import not_refused_so
from rpcwheel.errors import ConfigurationError
from rpcwheel.failback import FailbackPolicy


def test_a_stop_replaces_the_default_of_max_attempts_but_not_what_was_written():
    for settings, limit in [
        ({}, 4),
        ({"max_attempts": None}, None),
        ({"max_attempts": 1}, 1),
        ({"stop": tenacity.stop_after_delay(60)}, None),
        ({"stop": tenacity.stop_after_delay(60), "max_attempts": 4}, 4),
    ]:
        assert FailbackPolicy(retry_on=OSError, **settings).limit == limit


JOURNAL = "sqlite:///var/lib/shop/failback.db"


def refused(words, error=ConfigurationError, **settings):
    return partial(FailbackPolicy, **{"retry_on": OSError} | settings), error, words


def test_invalid_settings_are_refused_with_what_to_give():
    whole = "it must be a valid integer, not"
    names = "metadata: it must be a tuple or a list, such as"
    wait = "wait must be seconds"
    unused = "has an effect only with `journal`"
    rows = [
        (FailbackPolicy, ConfigurationError, "`retry_on` is missing; say which"),
        (FailbackPolicy, ConfigurationError, "StatusCode"),
        refused("no setting 'attempts'; did you mean 'max_attempts'?", attempts=3),
        refused("no setting 'xyz'; there are retry_on, max_attempts,", xyz=3),
        refused("`retry_on` is empty", retry_on=[]),
        refused("did you mean 'UNAVAILABLE'?", retry_on="UNAVAILBLE"),
        refused("`retry_on` holds 14; say which errors", TypeError, retry_on=14),
        refused("max_attempts: it must be greater than or equal to 1, not 0", max_attempts=0),
        refused(f"max_attempts: {whole} '3'", TypeError, max_attempts="3"),
        refused(f"max_attempts: {whole} True", TypeError, max_attempts=True),
        refused("max_pending: it must be greater than or equal to 1, not 0", max_pending=0),
        refused(f"max_pending: {whole} 1.5", TypeError, max_pending=1.5),
        refused(f"max_pending: {whole} None", TypeError, max_pending=None),
        refused("wait must not be negative", backoff=-1),
        *(refused(wait, TypeError, backoff=backoff) for backoff in (None, "5", True)),
        refused("wait is NaN", backoff=float("nan")),
        refused("\nmax_pending: ", backoff=float("nan"), max_pending=0),  # both are said
        refused("stop must be None or a tenacity stop object", TypeError, stop=3),
        refused("overflow: it must be 'raise' or 'drop', not 'wait'", overflow="wait"),
        refused("name: ", name=""),
        refused("name: it must be a valid string, not 5", TypeError, name=5),
        refused(f"{names} ('trace-id',) (in a file", TypeError, metadata="trace-id"),
        refused(names, TypeError, metadata=None),
        refused("metadata[0]: it must be a valid string, not 5", TypeError, metadata=[5]),
        refused("dead_letter: it must be callable, not 'log'", TypeError, dead_letter="log"),
        refused("did you mean sqlite://", journal="sqlit:///a.db"),
        refused("is not the URL of a journal", journal="a.db"),
        refused("journal: ", TypeError, journal=5),
        refused(f"max_age: {unused}", max_age=5.0),
        refused(f"order_key: {unused}", order_key="user"),
        refused(f"target: {unused}", target="orders:50051"),
        refused("max_age: ", journal=JOURNAL, max_age=0),
        refused("order_key", TypeError, journal=JOURNAL, order_key=5),
    ]
    assert not_refused_so(rows) == []


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


def test_a_policy_inside_another_model_is_checked_as_a_part_of_it():
    class Config(pydantic.BaseModel):
        failback: FailbackPolicy

    with pytest.raises(pydantic.ValidationError, match="failback"):
        Config(failback={"retry_on": "UNAVAILABLE", "max_attempts": 0})
    assert Config(failback={"retry_on": "UNAVAILABLE", "max_attempts": 8}).failback.limit == 8
