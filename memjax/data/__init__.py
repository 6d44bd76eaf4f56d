"""Documents and tasks: what is read, and in which pieces."""
