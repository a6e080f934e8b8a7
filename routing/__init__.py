"""Which replica gets a request, and how many replicas there are: pure rules, for servers and the simulator."""
