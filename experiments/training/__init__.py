"""Training of image codecs, transformers, and the classifier that judges their pictures."""
