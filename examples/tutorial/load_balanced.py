"""Load for all servers in the registry: python load_balanced.py CALLS_PER_SECOND."""

from client_balanced import SETTINGS, SHOP
from load import run_load

import rpcwheel

kit = rpcwheel.Kit.from_policy(SETTINGS)
with kit, kit.channel(SHOP) as channel:
    run_load(channel)
