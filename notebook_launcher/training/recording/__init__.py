"""What a training records: metrics, log lines, profiles, and the time of each phase."""
