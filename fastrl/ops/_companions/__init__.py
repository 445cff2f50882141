"""What goes along with rows of logits: a teacher's rows or tokens, the sampler's tokens."""
