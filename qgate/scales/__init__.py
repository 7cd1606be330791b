"""Powers of two as scales: levels of a sweep, and the search for the best one."""
