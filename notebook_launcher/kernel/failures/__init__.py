"""The culprit of a failure, its words, and a debugger in its frames."""
