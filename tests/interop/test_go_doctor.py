"""`rpcwheel doctor` with a server written in Go."""

import pytest

from fixtures.foreign_servers import BUILD_S
from rpcwheel.cli import main

pytestmark = pytest.mark.timeout(BUILD_S + 60)  # the server is built first


def test_a_go_server_is_healthy_and_refuses_early_pings(go_shop, capsys):
    assert main(["doctor", go_shop.target, "--samples", "8"]) == 0
    assert "gRPC works; the server has no health service" in capsys.readouterr().out
    assert main(["doctor", go_shop.target, "--samples", "1", "--keepalive", "0.1"]) == 1
    assert "too_many_pings') at ping 4" in capsys.readouterr().out
