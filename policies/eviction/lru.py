"""The least recently used page, and a prefix after its tail."""

from scheduling import eviction


class Eviction(eviction.Eviction):
    ranks = False
