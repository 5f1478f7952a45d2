"""What all components report to: counts of calls, traces, and the list of what runs.

`components` knows which timers, queues and channels exist, `call_counts` counts calls, `tracing`
adds events to spans, and `switches` says what the environment allows. Nothing here imports a
metrics package: `rpcwheel._autostart` does, when the first component is made.
"""
