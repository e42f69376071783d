"""The process among its peers: its rank and device, waiting for the others, and the share of each in a collection."""
