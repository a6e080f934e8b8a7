"""The scheduler: which sequences compute how many tokens in each step. It has no tensors.

This package imports only the standard library: no torch, no flask, no threading, and no clock or random generator of
its own. Times are arguments, and what computes a step is a function. So the server and the simulator run the same code.
"""
