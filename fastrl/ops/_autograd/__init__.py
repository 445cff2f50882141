"""What the custom autograd functions share."""
