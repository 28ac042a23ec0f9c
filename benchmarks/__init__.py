"""The programs of `make bench`. Nothing in the packages depends on them."""
