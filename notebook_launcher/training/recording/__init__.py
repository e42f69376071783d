"""Records of a training: metrics, log lines, profiles, and the time of each phase."""
