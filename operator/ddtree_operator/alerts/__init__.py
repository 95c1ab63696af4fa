"""Alertmanager's notifications: received, checked and recorded. What comes of them is the core's decision."""
