"""Manifests of engines and Services, and how they reach the API server."""
