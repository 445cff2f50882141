"""What targets.py compiles ahead of time, and what each kernel may cost on sm_90."""
