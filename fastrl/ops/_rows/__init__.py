"""Rows of logits: their statistics, losses and gradients, all at once or chunk by chunk."""
