"""Generators that write a trajectory token after token: autoregressive, vae and point-process."""
