"""The output of ranks on its way to the cell or the terminal, and what stays there."""
