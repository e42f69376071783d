"""The windows of accumulation: which micro-batches belong to one update, and how much each of them weighs.

`gradient_state.py` finds the window of each micro-batch, and says which micro-batch is the last one. `weighing.py`
gives the factor of each loss, and the correction of a window that held less than a full one. `loop_notes.py` knows if
each batch of a prepared loader got its micro-batch.
"""
