"""The daemon process around a worker: threads, sockets, lifecycle, order of steps. Knows no tensor
and imports no torch."""
