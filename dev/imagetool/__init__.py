"""Packs folders into OCI images and pushes them to a registry, without a builder and without copies on the disk."""
