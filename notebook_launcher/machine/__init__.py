"""Resources of this machine: cores, GPUs, memory, and which of them a launch takes."""
