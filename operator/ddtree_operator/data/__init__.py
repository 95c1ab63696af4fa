"""Files shipped with the operator."""
