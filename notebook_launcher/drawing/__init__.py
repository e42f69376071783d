"""A run as pictures, tables and text that need nothing to be read: no script, no style sheet, no other file.

What a notebook keeps of a run is made here, so it is read on machines, themes and code hosts that nobody knows.
Everything is a pure function of a `RunSnapshot` and `Curves`, and escapes what came from users.
"""
