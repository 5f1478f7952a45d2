"""The settings and parameters of the kits of `grpc` and `grpc.aio`."""

import inspect
from datetime import timedelta

import pytest

import rpcwheel
from rpcwheel import (
    BreakerPolicy,
    CallPolicy,
    ConcurrencyPolicy,
    ConfigurationError,
    Criticality,
    DeadlinePolicy,
    DefaultResponsePolicy,
    FailbackPolicy,
    HeartbeatPolicy,
    IdlePolicy,
    LimitPolicy,
    MethodPolicy,
    RatePolicy,
    RegistryPolicy,
    RetryPolicy,
    ThrottlePolicy,
)
from rpcwheel.kit import KitPolicy
from rpcwheel.kit.service_config import policy_from_service_config
from rpcwheel.options import server_options
from rpcwheel.publisher.publisher import PublisherBase
from rpcwheel.telemetry import components

RETRY = RetryPolicy(retry_on={"UNAVAILABLE"}, max_attempts=4)


@pytest.fixture(params=[rpcwheel.Kit, rpcwheel.aio.Kit], ids=["sync", "aio"])
def kind(request):
    """The kit of either world."""
    return request.param


def test_a_kit_takes_the_settings_of_kit_policy(kind):
    methods = {"/a/*": MethodPolicy(idempotent=True)}
    settings = {
        "timeout": DeadlinePolicy(timeout=2.0),
        "retry": RETRY,
        "hedging": None,
        "default_response": DefaultResponsePolicy(on="UNAVAILABLE"),
        "failback": None,
        "idempotent": True,
        "wait_for_ready": True,
        "criticality": Criticality.SHEDDABLE,
        "limit": LimitPolicy(),
        "throttle": ThrottlePolicy(),
        "breaker": BreakerPolicy(),
        "concurrency": ConcurrencyPolicy(),
        "rate": RatePolicy(rate=5.0),
        "methods": methods,
        "heartbeat": HeartbeatPolicy(interval=10.0),
        "idle": IdlePolicy(idle_timeout=60.0),
        "registry_policy": RegistryPolicy(lease_ttl=5.0),
        "status_port": None,
        "status_host": "localhost",
        "status_token": "correct-horse-battery",
    }
    assert kind(**settings).policy == KitPolicy(**settings)
    assert set(settings) == set(KitPolicy.model_fields)
    short = kind(timeout=2, limit="adaptive", heartbeat=10, idle=60, registry_policy=5).policy
    assert short.timeout.timeout == 2.0
    names = ("limit", "heartbeat", "idle", "registry_policy")
    assert {n: getattr(short, n) for n in names} == {n: settings[n] for n in names}
    minute = timedelta(minutes=1)
    assert kind(idle=minute).policy.idle == IdlePolicy(idle_timeout=minute)


def test_from_policy_takes_a_kit_policy_or_a_call_policy(kind):
    policy = KitPolicy(timeout=2.0, heartbeat=10.0)
    kit = kind.from_policy(policy)
    assert type(kit) is kind
    assert kit.policy is policy
    methods = {"/a/*": MethodPolicy(idempotent=True)}
    kit = kind.from_policy(CallPolicy(timeout=2.0, methods=methods))
    assert kit.policy == KitPolicy(timeout=2.0, methods=methods)


def test_policy_for_returns_the_effective_settings_of_a_method(kind):
    methods = {
        "/shop.Orders/*": MethodPolicy(timeout=5.0),
        "/shop.Orders/Get": MethodPolicy(idempotent=True),
    }
    kit = kind(timeout=2.0, retry=RETRY, methods=methods)
    effective = kit.policy_for("/shop.Orders/Get")
    assert effective == MethodPolicy(timeout=5.0, retry=RETRY, idempotent=True)
    assert kit.policy_for("/other.Service/Get") == MethodPolicy(timeout=2.0, retry=RETRY)
    with pytest.raises(AttributeError, match="cannot be changed"):
        effective.timeout = 3.0


def test_from_file_reads_a_file(kind, tmp_path):
    path = tmp_path / "shop.toml"
    path.write_text('retry = { retry_on = ["UNAVAILABLE"], max_attempts = 4 }')
    kit = kind.from_file(path)
    assert type(kit) is kind
    assert kit.policy == KitPolicy(retry=RETRY)


def test_from_env_reads_the_environment(kind, monkeypatch):
    monkeypatch.setenv("RPCWHEEL_RETRY__RETRY_ON", '["UNAVAILABLE"]')
    monkeypatch.setenv("RPCWHEEL_RETRY__MAX_ATTEMPTS", "4")
    assert kind.from_env().policy == KitPolicy(retry=RETRY)
    monkeypatch.setenv("SHOP_RPC_TIMEOUT", "3")
    assert kind.from_env("SHOP_RPC_").policy == KitPolicy(timeout={"timeout": 3.0})


def test_from_service_config_takes_a_service_config_of_grpc(kind):
    config = {"methodConfig": [{"name": [{}], "timeout": "60s"}]}
    expected = kind.from_policy(policy_from_service_config(config)).policy
    assert kind.from_service_config(config).policy == expected


def test_repr_names_the_settings_without_their_values(kind):
    secret = "swordfish"
    kit = kind(
        timeout=2.0,
        methods={
            "/a/*": MethodPolicy(failback=FailbackPolicy(retry_on="UNAVAILABLE", default=secret))
        },
    )
    assert repr(kit) == f"<{kind.__module__}.Kit: timeout, methods /a/*>"
    assert repr(kind()).endswith("Kit: nothing switched on>")


def test_a_kit_opens_its_journal_with_its_first_channel(tmp_path):
    policy = FailbackPolicy(retry_on=OSError, journal=f"sqlite://{tmp_path}/a.db", name="audit")
    before = components.of_kind("journal")
    equal = {"/a/*": MethodPolicy(failback=policy), "/b/*": MethodPolicy(failback=policy)}
    with rpcwheel.Kit(failback=policy.replace(), methods=equal):  # they share the queue
        assert not list(tmp_path.iterdir())
        assert components.of_kind("journal") == before


def test_a_coroutine_function_as_dead_letter_is_refused_without_an_event_loop():
    async def letter(call):
        """Keep it."""

    policy = FailbackPolicy(retry_on="UNAVAILABLE", dead_letter=letter)
    assert rpcwheel.aio.Kit(failback=policy).policy.failback is policy
    for settings in ({"failback": policy}, {"methods": {"/a/*": MethodPolicy(failback=policy)}}):
        with pytest.raises(ConfigurationError, match="dead_letter is a coroutine function"):
            rpcwheel.Kit(**settings)


def test_a_drain_timeout_that_is_no_time_closes_nothing(world):
    kit = world.keep(world.api.Kit(status_port=0, heartbeat=10.0))
    address = kit.status_address
    with pytest.raises(TypeError, match="drain_timeout"):
        world.do(kit.close, "soon")
    assert kit.status_address == address is not None
    world.keep(world.do(kit.channel, "127.0.0.1:1"))  # a closed kit with heartbeats makes none


def parameters_of(function):
    return {one.name: one.default for one in inspect.signature(function).parameters.values()}


def test_serve_has_the_parameters_of_a_publisher(kind):
    publisher = parameters_of(PublisherBase.__init__)
    renamed = {"registry", "services", "registry_policy", "timer", "on_serving", "signals"}
    assert parameters_of(kind.serve).items() >= {
        (name, default) for name, default in publisher.items() if name not in renamed
    }


def test_server_options_has_the_parameters_of_the_function(kind):
    own = parameters_of(kind.server_options)
    del own["self"]
    assert own == parameters_of(server_options)


def test_channel_has_the_parameters_of_insecure_channel(kind):
    renamed = {"registry", "registry_policy", "on_subchannel", "on_removed", "timer"}
    assert (
        parameters_of(rpcwheel.insecure_channel).keys() - renamed
        <= parameters_of(kind.channel).keys()
    )
