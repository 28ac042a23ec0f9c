"""Watchdogs, gauges, status and traces."""
