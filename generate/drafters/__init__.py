"""Drafters: one file each, which propose the next tokens of sequences (`scheduling/speculation.py`)."""
