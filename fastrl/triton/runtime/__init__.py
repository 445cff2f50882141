"""Registration of the operators."""
