"""Values that users choose: checks of options, the settings file, and changes during a run."""
