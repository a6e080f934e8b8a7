"""Orders, one per file: which waiting request is first, for any loop, as in `dynamic+sjf`.

A file has a class `Order`, which is a policy that overrides `order` and the hooks that feed it. Files whose names begin
with an underscore are shared by several orders.
"""
