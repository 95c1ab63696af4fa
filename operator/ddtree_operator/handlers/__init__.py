"""kopf and the reconcile loop: thin edges around the core."""
