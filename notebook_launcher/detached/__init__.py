"""Runs that outlive their kernel: a host conducts each of them, and kernels and terminals are its clients.

    kernel ─ AttachedRun ─ host.sock in the run's folder ─ host ─ Run ─ supervisor ─ ranks

The host is a process in a session of its own, without IPython. It conducts the run as a kernel does, keeps its output,
and moves values to the run's folder without opening them, because their classes belong to a notebook.
"""
