"""Orders, one a file: who of those that wait is first, for any loop, as in `dynamic+sjf`.

A file has a class `Order`, which is a policy that overrides `order` and what feeds it. Files whose names begin with an
underscore are what several orders share.
"""
