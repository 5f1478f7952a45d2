"""URLs of registries that make no sense are refused wherever a URL is taken."""

import grpc
import pytest

import rpcwheel
from rpcwheel import ConfigurationError, Kit, aio, open_registry

SERVICE = "shop.Orders"

BAD_URLS = {
    "": "is not the URL of a registry",
    "127.0.0.1:2379": "is not the URL of a registry",
    "etdc://127.0.0.1:2379": "did you mean etcd://",
    "consul://127.0.0.1": "no registry has the scheme 'consul'",
    "etcd://127.0.0.1:port": "a port is a number",
    "etcd://127.0.0.1:99999": "a port is a number",
    "etcd://127.0.0.1:2379?tsl=true": "did you mean",
    "zookeeper://": "",
    "redis://127.0.0.1?tls=maybe": "",
    "sqlite://": "the name of the file is missing",
    "sqlite://host/registry.db": "a file of this machine",
    "etcd://bob:pa@ss@127.0.0.1": "%40",
    "etcd://127.0.0.1/shop Orders": "the service must be a name",
    "etcd://127.0.0.1?namespace=a/b": "namespace must be a name",
}


async def test_a_bad_url_is_refused_at_once_by_everything_that_takes_one():
    kit, aio_kit = Kit(), aio.Kit()
    named = {"service": SERVICE}
    functions = {
        "open_registry": open_registry,
        "insecure_channel": lambda url: rpcwheel.insecure_channel(url, **named),
        "kit": lambda url: kit.channel(url, **named),
        "aio.open_registry": aio.open_registry,
        "aio.insecure_channel": lambda url: aio.insecure_channel(url, **named),
        "aio.kit": lambda url: aio_kit.channel(url, **named),
        "publisher": lambda url: rpcwheel.Publisher(grpc.server(None), url, port=1),
    }
    wrong = []
    for url, why in BAD_URLS.items():
        for name, function in functions.items():
            with pytest.raises(ConfigurationError) as refused:
                function(url)
            said = str(refused.value)
            is_address = "://" not in url and "service: only for a service in a registry" in said
            if (why not in said and not is_address) or "pa@ss" in said:
                wrong.append((url, name, said))
    assert wrong == []
