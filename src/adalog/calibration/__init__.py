"""What runs between a captured program and its assignments: observing, searching, refining."""
