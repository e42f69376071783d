"""Tests of static pictures, tables and text."""
