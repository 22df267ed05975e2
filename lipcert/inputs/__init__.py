"""Models, checkpoints and images from files, hubs and modules that a user holds."""
