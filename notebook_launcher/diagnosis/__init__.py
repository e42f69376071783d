"""`doctor()`: this machine and this process as a launch meets them, each fact with a verdict and what to type."""
