"""The schemas of requests in each dialect."""
