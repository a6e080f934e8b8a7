"""Policies of this project as the scheduler of vLLM."""
