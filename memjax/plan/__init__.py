"""What a training run would need on hardware that is not there: memory, arithmetic and time of its programs."""
