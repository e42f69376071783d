"""A call before its run: what is checked of it, what it is for, and how it goes to the ranks."""
