"""Dynamic SplitFuse (DeepSpeed-FastGen, arXiv 2401.08671): each step computes exactly C tokens while prompts wait.

Long prompts are cut, short ones are composed, so that a forward pass always has the size at which the hardware is
just saturated. In this scheduler `chunked` fills its steps in the same way, so the two differ in name alone; DeepSpeed
and Sarathi differ in how they chose C.
"""

from policies import chunked


class Policy(chunked.Policy):
    """The steps of `chunked`."""
