"""The laboratory: load, measures, comparisons and pictures; it knows a server by its URL alone."""
