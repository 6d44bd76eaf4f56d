"""What an agent acts in: the protocol, and a calculator."""
