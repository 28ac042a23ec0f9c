"""The wire between drivers and daemons: messages, bounds and codec; and the rendezvous of a group's
members. Needs msgspec and the standard library only."""
