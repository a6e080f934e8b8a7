"""Front ends: processes that read, check, tokenize, write and stream, before the one process that computes.

`./server.sh dynamic --front-ends 4` has them. All are workers of one gunicorn with the same Flask app. A front end carries
plain generations: the engine's process gets token ids, and answers with token ids. Every other request, it passes on with its
connection. Nothing outside this package knows about it, except `launch/gunicorn_conf.py`, which asks for it.
"""
