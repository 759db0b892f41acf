"""The demo: two processes serve one real model from one copy of its weights.

`python -m gpu_worker.demo`, or `weight-cache demo`. It starts a coordinator and workers of its own,
kills and replaces one, does the same work beside it without weight-cache, and checks every claim it
makes, mostly by asking the kernel.
"""
