"""The messages of processes, and the ways by which they go: channels, links, and the board."""
