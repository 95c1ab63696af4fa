"""Samples, sequential tests, parity and verdicts. Pure."""
