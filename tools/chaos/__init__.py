"""Breaks a running server in many ways and looks at what clients, operators and the machine see of it."""
