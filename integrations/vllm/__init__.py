"""Policies of this project inside engines that are not ours."""
