"""Inputs of the policy loss: the weights of its terms and the slopes of its tokens."""
