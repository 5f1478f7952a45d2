"""`rpcwheel doctor`: finds out why a gRPC server cannot be reached."""
