"""The public functions, which check arguments, choose the backend and differentiate."""
