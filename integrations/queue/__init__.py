"""A queue in front of language model servers that are not ours, under the policies of this project."""
