"""What a user may set."""

from unittest.mock import Mock

import pydantic
import pytest
import tenacity

from rpcwheel._grpc.calls import Details
from rpcwheel.call import CallPolicy
from rpcwheel.call.failback_policy import is_secret
from rpcwheel.call.failed_calls import ClientFailback
from rpcwheel.failback import FailbackPolicy
from rpcwheel.rpc import Kind


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
        (("USER", "Trace-*"), {"user", "trace-id", "trace-bin"}),
    ]:
        policy = FailbackPolicy(retry_on=OSError, metadata=patterns)
        keys = ("trace-id", "trace-bin", "user", "auth", "authorization")
        assert {key for key in keys if policy.keeps(key)} == kept
        assert {key for key in keys if policy.keeps(key.title())} == kept


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
    assert {key for key in keys if policy.keeps(key.title())} == kept


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
    assert {key for key in secret | public if is_secret(key.title())} == secret


def test_the_order_key_is_in_the_metadata_of_a_call_in_any_case():
    """An inner interceptor may change keys to lower case, as gRPC requires."""
    policy = FailbackPolicy(retry_on=OSError, order_key="Shop-id", journal=JOURNAL)
    failback = ClientFailback(CallPolicy(failback=policy), Mock())
    details = Details("/shop.Orders/Get", None, (("Shop-Id", "a"),), None, None, None)
    assert failback.failed_rpc(policy, Kind.UNARY_UNARY, details, [b""], None).order_key == "a"


def test_the_password_of_a_journal_is_not_in_the_representation_of_a_policy():
    policy = FailbackPolicy(retry_on=OSError, journal="redis://user:secret@127.0.0.1:6379")
    assert "secret" not in repr(policy)


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
