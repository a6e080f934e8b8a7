"""Many replicas of the server: which of them gets a request."""
