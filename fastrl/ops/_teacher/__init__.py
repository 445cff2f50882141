"""A teacher's distributions and a student's: their statistics, divergence and gradient."""
