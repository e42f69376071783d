"""Pictures, tables and text of a run that can be read without a script, a style sheet or another file.

What a notebook keeps of a run is made here, so it is read on unknown machines, themes and code hosts.
Everything is a pure function of a `RunSnapshot` and `Curves`, and escapes what came from users.
"""
