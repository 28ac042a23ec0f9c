"""The wire between drivers and daemons: messages, bounds and codec, and the errors of
both. Needs only msgspec and the standard library."""
