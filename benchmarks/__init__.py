"""What the project claims about speed and memory, measured beside its floor and its alternatives.

Each benchmark is a file that ends in rows (see `rows`). Ours, the floor and every peer are measured
interleaved in one run; what is compared is medians and their ratios. Absolute figures travel badly
from machine to machine, ratios better.
"""
