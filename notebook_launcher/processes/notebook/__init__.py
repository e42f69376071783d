"""The notebook's side of a rank: display, questions, widgets, cells and variables."""
