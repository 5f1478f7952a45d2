"""Where the file of what was known last is, and whether there is one."""

from fixtures.seen_worlds import SERVICE, instances
from rpcwheel.observe.events import SnapshotFailed
from rpcwheel.registry import snapshots as module
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.snapshots import open_snapshots
from rpcwheel.registry.url import RegistryUrl


def url(text="etcd", **parts):
    return RegistryUrl(text, (("10.0.0.2", 2379), ("10.0.0.1", 2379)), **parts)


def test_it_is_in_the_users_cache_directory_one_for_each_registry(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    others = [
        url(namespace="other"),
        url(user="shop", password="secret"),
        url(path="/x"),
        url("redis"),
        url(options={"db": "1"}),
    ]
    paths = [open_snapshots(one, RegistryPolicy()).path for one in (url(), *others)]
    assert len(set(paths)) == len(paths)
    assert {one.parent for one in paths} == {tmp_path / "rpcwheel"}
    assert paths[0].name.startswith("etcd-10.0.0.1-2379-10.0.0.2-2379-")
    same = RegistryUrl("etcd", (("10.0.0.1", 2379), ("10.0.0.2", 2379)), service="any")
    assert open_snapshots(same, RegistryPolicy()).path == paths[0]


def test_a_cache_directory_that_is_not_absolute_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    made = open_snapshots(url(), RegistryPolicy())
    assert made.path.parent == tmp_path / ".cache" / "rpcwheel"


def test_the_policy_may_name_the_file_or_want_none(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_snapshots(url(), RegistryPolicy(snapshot="~/x.json")).path == tmp_path / "x.json"
    assert open_snapshots(url(), RegistryPolicy(snapshot=False)) is None


def test_a_registry_of_this_process_has_none_unless_named(tmp_path):
    memory = RegistryUrl("memory")
    assert open_snapshots(memory, RegistryPolicy()) is None
    named = RegistryPolicy(snapshot=str(tmp_path / "x.json"))
    assert open_snapshots(memory, named) is not None


def test_a_user_without_a_home_has_none_and_is_told(monkeypatch, events):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(module.Path, "home", nowhere)
    assert open_snapshots(url(), RegistryPolicy()) is None
    assert [type(event) for event in events] == [SnapshotFailed]


def test_no_password_is_in_the_file(tmp_path):
    with_password = url(user="shop", password="secret")
    made = open_snapshots(with_password, RegistryPolicy(snapshot=str(tmp_path / "x.json")))
    made.keep(SERVICE, instances("a"))
    made.close()
    assert "secret" not in made.path.read_text()
