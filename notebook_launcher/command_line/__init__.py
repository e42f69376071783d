"""The command line, `python -m notebook_launcher` or `notebook-launcher`: one module for each command."""
