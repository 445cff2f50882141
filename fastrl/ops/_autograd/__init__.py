"""Autograd functions whose gradients are computed in the forward, and guards."""
