"""The list of names is that of the grpcio that is installed."""

import mmap
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from grpc._cython import cygrpc

from rpcwheel.options.names import KNOWN, OF_CHANNELS, OF_SERVERS, PROVED_ON, RETIRED

OF_PYTHON = "SingleThreadedUnaryStream"

NO_OPTIONS = re.compile(
    r"grpc\.(TEST|_cython|aio|channelz|client\.|client_ext|event_engine|experimental\.(event_engine"
    r"|grpclb|promise|server_c|stats)|fake|framework|health|http\.(do_not|tarpit)|internal|lb\."
    r"(?!ring)|lookup|reflection|resource_quota\.|rls|server\.tls|status|subchannel\.|testing|tls"
    r"|transport|xds_client|xds\.)"
)
"""Metrics, messages, and arguments that gRPC gives to itself."""


@pytest.fixture(scope="module")
def names():
    """What stands in gRPC's binary and looks like the name of an option."""
    with Path(cygrpc.__file__).open("rb") as file:
        binary = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with binary:
            found = {name.decode() for name in re.findall(rb"grpc\.[a-z][a-z0-9_.]+(?=\0)", binary)}
    return {name for name in found if not NO_OPTIONS.match(name)}


def of_a_newer_grpcio() -> bool:
    given, proved = (
        tuple(map(int, text.split(".")[:2])) for text in (version("grpcio"), PROVED_ON)
    )
    return given >= proved


@pytest.mark.skipif(not of_a_newer_grpcio(), reason="an older grpcio knows fewer")
def test_each_known_name_is_in_the_binary_of_grpcio(names):
    """Else gRPC has retired one: it moves to `RETIRED`, with what does it now."""
    assert not KNOWN - names - {OF_PYTHON}


def test_a_retired_name_is_not_in_the_binary_and_its_replacement_is_known(names):
    assert not RETIRED.keys() & names
    assert set(RETIRED.values()) <= KNOWN


@pytest.mark.skipif(not of_a_newer_grpcio(), reason="the list is of another version")
def test_each_time_option_in_the_binary_is_known(names):
    """Those that end in `_ms` are all options: a new one is to be added to `KNOWN`."""
    new = {name for name in names if name.endswith("_ms")} - KNOWN
    assert not new


def test_options_of_one_side_are_known():
    assert OF_CHANNELS | OF_SERVERS <= KNOWN
    assert not OF_CHANNELS & OF_SERVERS
