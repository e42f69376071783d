"""The kernel's end of the process tree."""
