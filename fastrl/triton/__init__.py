"""The Triton kernels, one module per operator, each imported at the first call of its operator."""
