"""The checks that every backend of a registry and every engine of a journal must pass."""
