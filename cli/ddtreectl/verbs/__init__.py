"""One module per verb. Nothing heavy is imported before a verb runs."""
