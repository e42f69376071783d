"""Tests of Accelerate's rules beside Accelerate itself."""
