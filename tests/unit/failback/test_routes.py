"""The routes to the targets of a queue."""

from rpcwheel.failback.routes import CallRoute, Routes


def test_a_finalizer_that_removes_a_route_during_a_lookup_leaves_the_others():
    def is_open() -> bool:
        routes.remove(dropped)
        return False

    routes = Routes()
    dropped = CallRoute("orders:50051", make=print, start=print, is_open=is_open)
    other = CallRoute("orders:50051", make=print, start=print)
    routes.add(dropped)
    routes.add(other)
    assert [routes.to("orders:50051"), routes.to("orders:50051")] == [other, other]
