"""The demo: one resource, five rollouts, an alert, a client that never stops asking."""
