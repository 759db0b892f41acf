"""Found by every Python process of a chaos run, which has this folder first on its PYTHONPATH."""

import os

folder = os.environ.get("WEIGHT_CACHE_CHAOS")
if folder:
    from tests.chaos.hook import install

    install(folder)
