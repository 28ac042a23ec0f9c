"""The driver's side: clients, groups, a launcher, a reference scheduler. Never imports torch."""
