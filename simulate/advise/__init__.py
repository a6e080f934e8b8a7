"""What other settings would have done to the requests of a log: which there are, which help, and was it true."""
