"""The programs of `make bench` and `make run`. Nothing in the packages depends on them."""
