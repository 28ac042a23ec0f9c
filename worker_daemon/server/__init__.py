"""The daemon process around a worker: threads, sockets, lifecycle, order of steps. Imports no
torch."""
