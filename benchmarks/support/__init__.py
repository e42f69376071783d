"""Parts of the programs that measure."""
