"""The server's own scheduler and policies on a virtual clock, with a cost where the model would be.

`python -m simulate --help` lists the commands. The law of this room: scheduling, policies, client, numpy and scipy;
no torch, no flask, no threads, no weights.
"""
