"""The Triton kernels, one module per operator, imported at the first call of the operator."""
