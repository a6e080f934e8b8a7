"""The engine on a GPU: the same interface, pages and sampling rule as on a CPU, and no Python between two kernels.

Importing this package does not load Triton. Only the modules `triton_*.py` do; they are imported by name, on a GPU or
in Triton's interpreter.
"""
