"""What layers remember from step to step: a marker type, the table of each op, and the update of all tables at once."""
