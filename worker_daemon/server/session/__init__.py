"""The driver's session: epoch, lease, drain, links, uploads."""
