"""The daemon: one process per device, controlled over ZeroMQ. Never imports worker_client."""
