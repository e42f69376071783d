"""The members of training: models and leaf tensors, each kind with its way to synchronise gradients.

`targets.py` and `members.py` find the members of an `accumulate`, and `synchronisation.py` decides when the gradients
of each are reduced. This room imports none of the other rooms of accumulation at run time; these import this room.
"""
