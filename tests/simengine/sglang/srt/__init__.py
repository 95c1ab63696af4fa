"""Holds what a patch series of the tests may change."""
