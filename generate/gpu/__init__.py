"""The engine on a GPU: the same seam, pages and sampling rule as on a CPU, and no Python between two kernels.

Importing this package loads no Triton; `triton_attention.py` and `triton_layers.py` do, and they are asked for by
name, on a GPU or in Triton's interpreter.
"""
