from fixtures.subchannel_pools import clock, make_pool, pool  # noqa: F401 - fixtures
