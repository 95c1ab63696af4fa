"""The pure heart: from what is wanted and what is observed to what to do next. No I/O, no clock."""
