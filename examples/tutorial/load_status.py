"""Load with a live view: python load_status.py CALLS_PER_SECOND."""

from client_balanced import SETTINGS, SHOP
from load import run_load

import rpcwheel
from rpcwheel.events import Event, SubchannelUnhealthy, add_sink


def show(event: Event) -> None:
    """Print the events that matter here. A program could send a message to its operators."""
    if isinstance(event, SubchannelUnhealthy):
        print("event: no calls for", event.subchannel)


add_sink(show)
kit = rpcwheel.Kit.from_policy(SETTINGS.replace(status_port=9090))
with kit, kit.channel(SHOP) as channel:
    run_load(channel)
