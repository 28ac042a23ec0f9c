"""The worker: one method per operation, over its device, model and runner."""
