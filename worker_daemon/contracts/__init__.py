"""Values and interfaces that layers and kernels share."""
