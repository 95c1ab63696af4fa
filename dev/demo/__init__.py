"""The demo: one resource, five rollouts, a client that never stops asking."""
