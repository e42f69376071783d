"""Cells on ranks: `%%ranks`, their values, names and completion."""
