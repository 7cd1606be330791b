"""Find the commit at which a gate turned red."""
