"""Faults put in by hand, and which of them the tests near them see."""
