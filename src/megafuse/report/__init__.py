"""Reports for people from records; measures nothing."""
