"""One micro-batch: the block around it, and its backward.

`blocks.py` switches the members off and back, and begins and ends the micro-batch in its window. `micro_batches.py`
runs the backward with the factor that the window gives; the clock, the safepoint and the check of the ranks follow
from there.
"""
