"""Evictions, one per file: which cached page goes first when a request needs one (`scheduling/eviction.py`)."""
