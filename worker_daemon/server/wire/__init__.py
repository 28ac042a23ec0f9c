"""Sockets, their files, and what goes over them."""
