"""Gates: commands that prove what the project claims, `python -m tools.gates NAME`."""
