"""Everything odd about grpcio, in one room: nothing outside knows its private ways.

What rests on something private, or on a behaviour that no document promises, says which grpcio it
was proved on; `tests/interop/grpcio` tells when one of them changes.
"""
