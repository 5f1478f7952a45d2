"""Private: what journals and registries share of their engines: SQLite, Redis, and TLS."""
