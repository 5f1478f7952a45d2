"""All of it in one object (to come)."""

__all__: list[str] = []
