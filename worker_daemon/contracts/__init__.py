"""Values and interfaces that layers and kernels share. Knows neither of them."""
