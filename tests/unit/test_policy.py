"""The base of all policies: what it refuses, and its error messages."""

import copy
import pickle
import re
from datetime import timedelta
from functools import partial
from typing import Annotated

import pytest
import tenacity
from pydantic import Field, StrictInt

from fixtures.refusals import not_refused_so
from rpcwheel.backoff import JitteredWait
from rpcwheel.call import RetryPolicy
from rpcwheel.errors import ConfigurationError
from rpcwheel.failback import FailbackPolicy
from rpcwheel.idle import IdlePolicy
from rpcwheel.kit import KitPolicy
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


class Middle(Policy):
    inner: Inner | None = None


class Around(Policy):
    inners: dict[str, Middle] = {}  # noqa: RUF012 - pydantic copies it


def test_an_error_names_the_place_of_each_mistake():
    inner = {"on": "a", "attempts": 0}
    with pytest.raises(ConfigurationError) as refused:
        Outer(timeout=-1, inner=inner, inners={"/shop.Orders/Get*": inner | {"atempts": 1}})
    assert str(refused.value).split("\n") == [
        "timeout: it must be a finite time above zero (at least 1 ns), not -1",
        "inner.attempts: it must be greater than or equal to 1, not 0",
        'inners["/shop.Orders/Get*"].attempts: it must be greater than or equal to 1, not 0',
        "inners[\"/shop.Orders/Get*\"]: there is no setting 'atempts'; did you mean 'attempts'?",
    ]


def test_an_error_describes_a_missing_setting():
    with pytest.raises(ConfigurationError, match=r"^inner: `on` is missing; name one$"):
        Outer(inner={})
    with pytest.raises(ConfigurationError, match=r"^`on` is missing; name one$"):
        Inner()


def test_a_wrong_type_raises_type_error_with_its_place():
    with pytest.raises(TypeError, match=r"^inner\.attempts: .* valid integer, not '3'$"):
        Outer(inner={"on": "a", "attempts": "3"})


def test_wrong_types_and_wrong_values_together_raise_configuration_error():
    with pytest.raises(ConfigurationError, match=r"valid integer, not '3'\n.*equal to 1, not 0"):
        Outer(inner={"on": "a", "attempts": "3"}, inners={"x": {"on": "a", "attempts": 0}})


def test_a_policy_inside_a_policy_is_not_copied():
    inner = Inner(on="a")
    assert Outer(inner=inner).inner is inner


def test_a_policy_is_immutable_and_can_be_copied_and_pickled():
    policy = Outer(timeout=2.0, inner=Inner(on="a"))
    with pytest.raises(
        AttributeError, match=r"Outer cannot be changed; .* policy\.replace\(timeout="
    ):
        policy.timeout = 3.0
    with pytest.raises(AttributeError, match="cannot be changed"):
        del policy.timeout
    assert policy.timeout == 2.0
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy


def test_replace_returns_a_checked_copy_with_other_settings():
    policy = Outer(timeout=2.0, inner=Inner(on="a", attempts=2))
    other = policy.replace(share=0.5, inner=policy.inner.replace(attempts=4))
    assert other == Outer(timeout=2.0, share=0.5, inner=Inner(on="a", attempts=4))
    assert policy.replace(timeout=3.0).model_fields_set == {"timeout", "inner"}  # not `share`
    assert policy == Outer(timeout=2.0, inner=Inner(on="a", attempts=2))
    with pytest.raises(ConfigurationError, match="finite time above zero"):
        policy.replace(timeout=-1)


def test_an_error_names_the_inner_policy_that_has_a_setting():
    with pytest.raises(ConfigurationError, match=r"did you mean inner=Inner\(attempts=2\)\?"):
        Outer(attempts=2)


def test_an_error_names_the_policy_that_takes_a_misplaced_one():
    with pytest.raises(
        TypeError, match=r"^inners\.x: it must be a Middle, not an Inner; write Middle\(inner="
    ):
        Around(inners={"x": Inner(on="a")})
    with pytest.raises(TypeError, match=r"^inner: it must be an Inner, not a Middle$"):
        Middle(inner=Middle())


def test_an_error_does_not_show_the_contents_of_a_policy():
    with pytest.raises(
        TypeError, match=r"^heartbeat: it must be .* HeartbeatPolicy, not Inner\(\.\.\.\)$"
    ):
        KitPolicy(heartbeat=Inner(on="a"))


def test_a_time_is_seconds_or_a_timedelta():
    for time in [0.5, 2, timedelta(seconds=2), 1e-9]:
        assert Outer(timeout=time).timeout == time


def test_other_times_and_numbers_are_refused():
    inf, nan = float("inf"), float("nan")
    not_above_zero = (0, -1, nan, -inf, timedelta(0), 1e-10)
    no_times = ("2", "PT2S", "2 s", True, b"2", [2])
    no_number = "share: it must be a valid number"
    finite = "timeout: it must be a finite time"
    rows = [
        *((partial(Outer, timeout=t), ConfigurationError, finite) for t in not_above_zero),
        (partial(Outer, timeout=inf), ConfigurationError, "for no limit give None"),
        *((partial(Outer, timeout=t), TypeError, "timeout: it must be seconds") for t in no_times),
        (partial(Outer, share="0.2"), TypeError, no_number),
        (partial(Outer, share=True), TypeError, no_number),
    ]
    assert not_refused_so(rows) == []
    assert Outer(share=1).share == 1.0


def test_a_backoff_table_becomes_a_wait_of_which_half_is_random_unless_jitter_is_set():
    table = {"initial": 0.1, "max": timedelta(seconds=2)}
    more = {"multiplier": 3, "jitter": 0}
    assert Inner(on="a", wait=table).wait == JitteredWait(0.1, 2.0, multiplier=2.0, jitter=0.5)
    assert Inner(on="a", wait=table | more).wait == JitteredWait(0.1, 2.0, 3.0, jitter=0.0)


def test_a_wrong_backoff_table_is_refused():
    for table, said in [
        ({"initial": 0.1}, "`max` is missing"),
        ({"inital": 0.1, "max": 2.0}, "no setting 'inital'; did you mean 'initial'?"),
        ({"initial": 3.0, "max": 2.0}, "initial (3) is more than max (2)"),
        ({"initial": 0.1, "max": 2.0, "multiplier": 0.5}, "multiplier: it must be greater"),
        ({"initial": 0.1, "max": 2.0, "multiplier": float("inf")}, "multiplier: "),
        ({"initial": 0.1, "max": 2.0, "jitter": 1.1}, "jitter: it must be less"),
        ({"initial": 0.1, "max": 2.0, "jitter": float("nan")}, "jitter: "),
        ({"initial": 0.1, "max": float("inf")}, "max: it must be a finite time"),
    ]:
        with pytest.raises(ConfigurationError, match=r"^inner\.wait: .*" + re.escape(said)):
            Outer(inner={"on": "a", "wait": table})


def test_field_at_finds_fields_in_tables_and_optional_policies():
    owner, field = field_at(Outer, ("inners", "some key", "attempts"))
    assert (owner, field) == (Inner, Inner.model_fields["attempts"])
    assert field_at(Outer, ("inner", "inner")) == (Inner, None)
    assert set(types_in(Outer.model_fields["timeout"].annotation)) == {
        float,
        timedelta,
        type(None),
    }


def test_positional_settings_are_refused():
    with pytest.raises(TypeError, match=r"by name: IdlePolicy\(idle_timeout=180\)"):
        IdlePolicy(180)


def test_a_word_of_a_setting_suggests_the_setting():
    for kind, name, meant in [
        (RetryPolicy, "on", "retry_on"),
        (RetryPolicy, "attempts", "max_attempts"),
        (IdlePolicy, "check", "check_interval"),
    ]:
        with pytest.raises(
            ConfigurationError, match=f"no setting '{name}'; did you mean '{meant}'"
        ):
            kind(**{name: 1})


def test_the_repr_of_a_policy_has_no_addresses():
    policy = FailbackPolicy(
        retry_on=[OSError, tenacity.retry_if_exception(callable)],
        backoff=tenacity.wait_fixed(1) + tenacity.wait_random(0, 2),
        stop=tenacity.stop_after_attempt(3),
        dead_letter=lambda failed: None,
    )
    assert " at 0x" not in repr(policy)
    for text in (
        "stop=stop_after_attempt(max_attempt_number=3)",
        "wait_combine(wait_funcs=(wait_fixed(wait_fixed=1.0), wait_random(",
        "test_policy.test_the_repr_of_a_policy_has_no_addresses.<locals>.<lambda>",
    ):
        assert text in repr(policy)
