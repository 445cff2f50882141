"""Kernels over rows of logits."""
