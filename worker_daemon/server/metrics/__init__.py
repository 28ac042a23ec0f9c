"""Metrics and health of a daemon over HTTP (`--metrics-listen`)."""
