"""A rank: the calls it serves, its process, its group, and libraries that it makes fit."""
