"""Times: of steps, requests and tokens (run_times.py, step_times.py, token_times.py), and traces of
all daemons on one clock (observer.py, trace_merge.py, clocks.py)."""
