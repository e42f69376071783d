"""Widgets of ranks in the page: their messages, both ways."""
