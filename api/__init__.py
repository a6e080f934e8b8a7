"""The HTTP face: bodies in, answers out, one schema and one table of errors for all dialects.

The law of this room: it imports batching, stats, config, flask and pydantic. What it needs of the engine (a
tokenizer, a way to make an inference) comes in a `Service`, so that it never imports torch.
"""
