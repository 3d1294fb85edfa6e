"""Top-k updates with error feedback on the devices, an adaptive optimizer on the server."""
