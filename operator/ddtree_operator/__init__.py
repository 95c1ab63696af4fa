"""Operator that builds, canaries and promotes DDTree engines on Kubernetes."""

__version__ = "0.1.0"
