"""Tests of the shares of samplers."""
