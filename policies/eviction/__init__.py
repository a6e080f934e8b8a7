"""Evictions, one per file: which cached page to evict when a request needs one (`scheduling/eviction.py`)."""
