"""The model of a panel: options, arguments, and what is wrong with them; no widget."""
