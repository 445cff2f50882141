"""What is compiled ahead of time by bench/targets.py, and what each kernel may cost on sm_90."""
