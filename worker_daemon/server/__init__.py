"""The daemon process around a worker: threads, sockets, lifecycle, order of steps. Does not import
torch."""
