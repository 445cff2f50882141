"""The distributions of a student and a teacher: their statistics, divergence and gradient."""
