"""The command line of `worker-client`."""
