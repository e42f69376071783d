"""The other end: fork server and supervisor; below them the rooms of a rank."""
