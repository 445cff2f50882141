"""Autograd functions for gradients that are computed in the forward, and guards."""
