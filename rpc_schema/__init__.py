"""The wire between drivers and daemons: messages, bounds and codec; and where members of a group
meet. Needs msgspec and the standard library only."""
