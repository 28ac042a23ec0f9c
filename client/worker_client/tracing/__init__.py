"""Times: of steps and requests (run_times.py, step_times.py), and traces of all daemons on one
clock (observer.py, trace_merge.py, clocks.py)."""
