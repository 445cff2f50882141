"""Rows that have kept a part of the vocabulary: their columns and their statistics."""
