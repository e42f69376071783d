"""`export(...)`: a function of the notebook as a script for torchrun, `notebook-launcher launch` and Slurm."""
