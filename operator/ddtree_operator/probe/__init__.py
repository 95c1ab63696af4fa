"""Prompts and counters against engine pods."""
