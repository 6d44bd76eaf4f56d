"""One attempt at a task: what an agent may do, the journal of what it did, and the trajectory that this leaves."""
