"""Programs that measure; nothing of rpcwheel imports them."""
