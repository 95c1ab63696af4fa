"""Which nodes fit, and why the others do not."""
