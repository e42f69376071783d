"""Pictures, tables and text of a run that can be read without a script, a style sheet or another file.

What a notebook keeps of a run is made here, so it is read on machines, themes and code hosts that nobody knows.
Everything is a pure function of a `RunSnapshot` and `Curves`, and escapes what came from users.
"""
