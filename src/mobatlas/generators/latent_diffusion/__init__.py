"""The paper's generator: a BART autoencoder and a diffusion transformer over its latents."""
