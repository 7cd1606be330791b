"""Files that are shipped beside weights: read, compared with the parent's, and with each other."""
