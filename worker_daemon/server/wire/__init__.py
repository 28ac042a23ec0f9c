"""Sockets, their files, and the messages on them."""
