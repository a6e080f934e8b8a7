"""Drafters: one file each, which guess the next tokens of sequences (`scheduling/speculation.py`)."""
