"""`notebook-launcher check`: what can only be tried on a GPU, tried there, each check in a process of its own."""
