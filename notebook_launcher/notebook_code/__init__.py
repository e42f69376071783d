"""The code of a notebook: the definitions that a function uses, and their sources."""
