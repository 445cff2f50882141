"""The LM head: logits of hidden states, and the gradients of its parameters."""
