"""Support code that several test suites share."""
