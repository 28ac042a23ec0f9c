"""What `make bench` and `make run` execute. Nothing in the packages depends on it."""
