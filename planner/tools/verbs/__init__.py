"""Verbs of the command on models and plans: export, import, simulate, explain, show."""
