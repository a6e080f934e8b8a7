"""The board: each published factor of a policy, beside the same ratio of two runs of ours. `papers.ini` is its table."""
