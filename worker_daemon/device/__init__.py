"""The device and its memory."""
