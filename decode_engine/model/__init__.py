"""The model over sessions: tokens in, logits out, with our attention in place of its own."""
