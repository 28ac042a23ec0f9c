"""The driver's session: epoch, lease, order of steps, drain, links, uploads."""
