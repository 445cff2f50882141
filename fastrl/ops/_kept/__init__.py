"""Rows restricted to the tokens that a sampler kept: their columns and statistics."""
