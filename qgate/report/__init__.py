"""Shows what was computed: it reads results and plain numbers, and needs no torch."""
