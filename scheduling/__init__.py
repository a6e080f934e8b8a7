"""Who computes what, when: sequences, policies, pages and the loop's record, with no tensor in sight.

The law of this room: it imports the standard library alone. No torch, no flask, no threading, and no clock or
random generator of its own; time comes as an argument, and what computes a step is a function that is passed in.
So the server and the simulator run the same bytes.
"""
