"""The engine as a server: OpenAI's and JetStream's interfaces, the memory loop as an endpoint, and its operation."""
