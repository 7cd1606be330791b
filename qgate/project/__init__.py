"""The settings of a project, for pytest runs and for commands alike."""
