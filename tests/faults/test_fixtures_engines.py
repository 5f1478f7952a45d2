"""The engines of the tests do what their names say."""

import pytest

from fixtures.engine_etcd import EtcdEngine
from fixtures.engines import PORTS, engine_fixture

etcd = engine_fixture(EtcdEngine, scope="function")


def test_a_restart_keeps_what_is_there_and_a_wipe_does_not(etcd) -> None:
    port = etcd.port
    etcd.put("a", b"1")
    etcd.restart()
    assert etcd.records() == {"a": b"1"}
    etcd.wipe()
    assert etcd.records() == {}
    assert etcd.port == port
    assert port in PORTS


def test_after_a_flush_nothing_is_there_but_the_engine(etcd) -> None:
    etcd.put("a", b"1")
    etcd.flush()
    assert etcd.records() == {}
    assert etcd.running


def test_a_frozen_engine_answers_when_it_is_thawed(etcd) -> None:
    etcd.freeze()
    with pytest.raises(OSError, match="timed out"):
        etcd.ready()
    etcd.thaw()
    assert etcd.ready()


def test_nothing_is_left_of_an_engine_though_it_is_frozen(etcd) -> None:
    etcd.freeze()
    etcd.close()
    assert not etcd.running
    assert not etcd.directory.exists()


def test_a_url_names_the_place_the_login_and_the_options(etcd) -> None:
    url = etcd.url("shop.Orders", user="bob:p@ss", namespace="test")
    assert url == f"etcd://bob:p%40ss@127.0.0.1:{etcd.port}/shop.Orders?namespace=test"
    with etcd.proxy() as proxy:
        assert etcd.url(port=proxy.port) == f"etcd://{proxy.target}"


class Absent(EtcdEngine):
    program = "no-such-program"
    package = "no-such-package"


class Broken(EtcdEngine):
    def command(self) -> list[str]:
        return ["etcd", "--no-such-flag"]


def test_one_that_is_not_installed_says_what_to_install() -> None:
    assert Absent.available() == (
        "no-such-program is not installed (Debian: apt-get install no-such-package)"
    )


def test_one_that_does_not_start_shows_what_it_said(etcd) -> None:
    with pytest.raises(RuntimeError, match="no-such-flag"):
        Broken().__enter__()
