"""Rendezvous of a group's members on TCP, and its protection from strangers: a store of addresses,
and filters for listening sockets. Needs only the standard library."""
