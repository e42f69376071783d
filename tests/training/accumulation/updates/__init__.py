"""Tests of updates: clipping, schedules, and the scaler of fp16."""
