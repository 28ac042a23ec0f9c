"""Metrics of a server, under its own names and under vLLM's:

table.py    names, labels and meanings
counts.py   what requests and answers count, on the event loop
readings.py the values of a scrape
"""
