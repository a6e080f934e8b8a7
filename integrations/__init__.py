"""This project's policies with servers and clusters that are not ours."""
