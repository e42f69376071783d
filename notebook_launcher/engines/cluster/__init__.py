"""Ranks on several machines: an agent on each of them, and the kernel's end of all agents."""
