"""The autoregressive generator: a causal transformer that writes a trajectory token after token."""
