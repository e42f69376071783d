"""The launcher side: runs in the user's kernel."""
