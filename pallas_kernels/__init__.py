"""Accelerator operations, one folder per operation. Nothing here knows models or policies."""
