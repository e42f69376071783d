"""The updates of prepared optimizers and schedulers, which are made where a window ends and nowhere else.

`updates.py` refuses a step whose gradients are not whole, clips, and steps; `optimizer.py` and `scheduler.py` are the
objects that `prepare` returns.
"""
