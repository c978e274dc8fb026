"""Measurements: scripts that print ratios within one run, never timed tests."""
