"""Pipelines in diffusers' manner; each is imported by its own name, so that nothing heavy is imported here."""
