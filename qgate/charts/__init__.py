"""What pages and pictures are made of: parts of pages, figures, one palette."""
