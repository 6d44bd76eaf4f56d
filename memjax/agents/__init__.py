"""How a task is worked: agents that turn a question and a document into a trajectory of conversations."""
