"""A teacher's distributions beside a student's: their statistics, divergence and gradient."""
