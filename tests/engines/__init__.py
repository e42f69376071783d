"""Tests of engines: launches whose ranks run on other machines than the kernel."""
