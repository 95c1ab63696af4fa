"""Scripts that run inside an image being built; read as text, never imported by the operator."""
