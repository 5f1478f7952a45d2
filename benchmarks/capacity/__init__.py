"""What rpcwheel occupies: memory, threads, descriptors, series of metrics and disk. No times."""
