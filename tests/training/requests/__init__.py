"""Tests of requests of the launcher to training ranks."""
