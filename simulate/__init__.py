"""The server's own scheduler and policies on a virtual clock, with a cost where the model would be.

`./eb simulate --help` lists the commands. A run is a `Scenario` (`scenario.py`), which `simulator.py` serves. No torch,
no flask, no threads, no weights.
"""
