"""Programs: captured, rewritten, and what is found in their flow of data."""
