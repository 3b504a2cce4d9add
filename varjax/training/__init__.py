"""Training of the image codec (VQVAE) and of the transformer (VAR)."""
