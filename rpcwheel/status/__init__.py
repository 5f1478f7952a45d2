"""What runs in this process now, for metrics and the live view.

`snapshot()` describes all components of the process. `StatusServer` serves that over HTTP.
"""
