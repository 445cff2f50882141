"""The Triton kernels, one module per operator; none is imported before its first call."""
