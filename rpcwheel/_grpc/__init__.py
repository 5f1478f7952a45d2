"""Private: the code that depends on grpcio's private parts and on the texts of its statuses.

`docs/grpcio.md` lists these facts, with the tests that fail when they change.
"""
