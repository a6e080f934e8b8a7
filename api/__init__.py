"""The HTTP API: routes, schemas, and one table of errors for all dialects.

It never imports torch. What it needs of the engine, such as a tokenizer, comes in a `Service`.
"""
