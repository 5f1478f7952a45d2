"""What a user may set for registries, and how wrong settings are refused."""

from datetime import timedelta

import pytest
import tenacity

from rpcwheel.errors import ConfigurationError
from rpcwheel.registry.policy import RegistryPolicy


def test_the_defaults_are_these():
    assert RegistryPolicy().model_dump() == {
        "lease": 15.0,
        "renew": None,
        "timeout": 3.0,
        "retry": None,
        "jitter": None,
        "hold": None,
        "protect": True,
        "snapshot": True,
    }


def test_every_setting_is_kept_as_given():
    settings = {
        "lease": timedelta(seconds=30),
        "renew": 5,
        "timeout": 1.5,
        "retry": tenacity.wait_fixed(1),
        "jitter": 1.0,
        "hold": 60.0,
        "protect": False,
        "snapshot": "registry.json",
    }
    assert RegistryPolicy(**settings).model_dump() == settings


def test_a_plain_number_stands_for_the_lease():
    assert RegistryPolicy.short == "lease"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lease": 0}, "lease: it must be a finite time above zero"),
        ({"timeout": -1}, "timeout: it must be a finite time above zero"),
        ({"lease": 3.0, "renew": 3.0}, r"renew \(3.0\) must be less than lease \(3.0\)"),
        ({"lease": 3.0, "renew": timedelta(minutes=1)}, "renew .* must be less than lease"),
        ({"retry": -1}, "retry"),
        ({"snapshot": ""}, "snapshot: it must be a file, True or False"),
        *(
            ({"snapshot": word}, f"a file, true or false, not the text '{word}'.*'./{word}'")
            for word in ("no", "off", "False", "yes", "TRUE", "on", "0")
        ),
        ({"leese": 1}, "did you mean 'lease'"),
    ],
)
def test_what_makes_no_sense_is_refused(given, said):
    with pytest.raises(ConfigurationError, match=said):
        RegistryPolicy(**given)


@pytest.mark.parametrize("given", [{"retry": "x"}, {"snapshot": 3}, {"protect": 1}, {"lease": "5"}])
def test_a_wrong_type_is_a_type_error(given):
    with pytest.raises(TypeError, match=next(iter(given))):
        RegistryPolicy(**given)
