"""The wire between drivers and daemons: messages, bounds and codec; the errors of both; and the
rendezvous of a group's members. Needs only msgspec and the standard library."""
