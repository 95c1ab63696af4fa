"""Command line for DDTreeDeployment rollouts."""
