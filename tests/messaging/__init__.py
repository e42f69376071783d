"""Tests of the messages that processes send each other."""
