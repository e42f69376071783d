"""The live view of a run: its data as messages, the widget, and the way of clicks while a cell is busy."""
