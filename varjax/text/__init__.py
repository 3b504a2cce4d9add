"""Text for text-to-image models: encoder, tokenizer, features."""
