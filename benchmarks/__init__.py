"""Programs that measure; nothing of rpcwheel imports them."""

import os

os.environ["RPCWHEEL_METRICS"] = (
    "off"  # of this process and its children: the costs without metrics
)
