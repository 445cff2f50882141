"""The public functions: check, choose the backend, differentiate."""
