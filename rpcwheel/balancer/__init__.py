"""Client-side load balancing: one subchannel for each instance, and a picker that chooses one."""

__all__: list[str] = []
