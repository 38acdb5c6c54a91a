"""Benches: commands that measure, `python -m tools.bench NAME`."""
