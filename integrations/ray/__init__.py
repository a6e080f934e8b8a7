"""Replicas of the server on a Ray cluster, behind one queue that chooses among them."""
