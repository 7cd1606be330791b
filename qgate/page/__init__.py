"""What the gates of a run found, as people read it: on a page, in a terminal, in a table."""
