"""Prepared loaders: each reads its rank's share, knows its position, and can be left and continued."""
