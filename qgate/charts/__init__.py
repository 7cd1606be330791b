"""Parts of pages and pictures: templates, SVG, matplotlib sheets, one palette."""
