"""Private: all that depends on how grpcio works inside, or on the text of its statuses.

`docs/grpcio.md` lists the facts, with the tests that notice when they change.
"""
