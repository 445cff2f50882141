"""Advantages within groups of rewards."""
