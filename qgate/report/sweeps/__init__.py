"""What a sweep found, as texts and tables."""
