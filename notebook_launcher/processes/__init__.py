"""The process side: code of the processes outside the kernel."""
