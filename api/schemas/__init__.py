"""What a request may contain: types and limits for all dialects, and schemas that are too long to stand beside their route."""
