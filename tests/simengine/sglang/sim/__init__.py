"""The simulation: its script, its model, its server."""
