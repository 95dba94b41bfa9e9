"""Training of all generators: the loop, checkpoints, devices and memory."""
