"""The base of all policies. What it refuses: tests/contract/refusals/rpcwheel.txt."""

import copy
import pickle
from datetime import timedelta
from functools import partial
from typing import Annotated

import tenacity
from pydantic import Field, StrictInt

from rpcwheel.backoff import JitteredWait
from rpcwheel.failback import FailbackPolicy
from rpcwheel.policy import Number, Policy, Seconds, Wait, field_at, types_in


class Inner(Policy):
    on: str = Field(description="name one")
    attempts: Annotated[StrictInt, Field(ge=1)] = 3
    wait: Wait = 1.0


class Outer(Policy):
    timeout: Seconds | None = None
    share: Number | None = None
    inner: Inner | None = None
    inners: dict[str, Inner] = {}  # noqa: RUF012 - pydantic copies it


def test_a_policy_inside_a_policy_is_not_copied():
    inner = Inner(on="a")
    assert Outer(inner=inner).inner is inner


def test_a_policy_can_be_copied_and_pickled():
    policy = Outer(timeout=2.0, inner=Inner(on="a"))
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy


def test_replace_returns_a_checked_copy_with_other_settings():
    policy = Outer(timeout=2.0, inner=Inner(on="a", attempts=2))
    other = policy.replace(share=0.5, inner=policy.inner.replace(attempts=4))
    assert other == Outer(timeout=2.0, share=0.5, inner=Inner(on="a", attempts=4))
    assert policy.replace(timeout=3.0).model_fields_set == {"timeout", "inner"}  # not `share`
    assert policy == Outer(timeout=2.0, inner=Inner(on="a", attempts=2))


def test_a_time_is_seconds_or_a_timedelta():
    for time in [0.5, 2, timedelta(seconds=2), 1e-9]:
        assert Outer(timeout=time).timeout == time
    assert Outer(share=1).share == 1.0


def test_a_backoff_table_becomes_a_wait_of_which_half_is_random_unless_jitter_is_set():
    table = {"initial": 0.1, "max": timedelta(seconds=2)}
    more = {"multiplier": 3, "jitter": 0}
    assert Inner(on="a", wait=table).wait == JitteredWait(0.1, 2.0, multiplier=2.0, jitter=0.5)
    assert Inner(on="a", wait=table | more).wait == JitteredWait(0.1, 2.0, 3.0, jitter=0.0)


def test_field_at_finds_fields_in_tables_and_optional_policies():
    owner, field = field_at(Outer, ("inners", "some key", "attempts"))
    assert (owner, field) == (Inner, Inner.model_fields["attempts"])
    assert field_at(Outer, ("inner", "inner")) == (Inner, None)
    assert set(types_in(Outer.model_fields["timeout"].annotation)) == {
        float,
        timedelta,
        type(None),
    }


def test_the_repr_of_a_policy_has_no_addresses():
    policy = FailbackPolicy(
        retry_on=[OSError, tenacity.retry_if_exception(callable), partial(field_at, path=types_in)],
        backoff=tenacity.wait_fixed(1) + tenacity.wait_random(0, 2),
        stop=tenacity.stop_after_attempt(3),
        dead_letter=lambda failed: None,
    )
    assert " at 0x" not in repr(policy)
    for text in (
        "stop=stop_after_attempt(max_attempt_number=3)",
        "wait_combine(wait_funcs=(wait_fixed(wait_fixed=1.0), wait_random(",
        "partial(func=rpcwheel.policy.field_at, args=(), path=rpcwheel.policy.types_in)",
        "test_policy.test_the_repr_of_a_policy_has_no_addresses.<locals>.<lambda>",
    ):
        assert text in repr(policy)
