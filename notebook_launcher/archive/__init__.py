"""Runs that left a folder, as users open them: `runs()`, `open_run(...)`, `RecordedRun`."""
