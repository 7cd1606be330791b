"""Tell from the code alone which functions of a project a difference can touch."""
