"""The wire between drivers and daemons: messages, bounds and codec; and the rendezvous of a group's
members. Needs only msgspec and the standard library."""
