"""The wire between drivers and daemons: messages, bounds and codec. Needs msgspec and the standard
library only."""
