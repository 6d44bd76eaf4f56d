"""Qwen2 in Flax: the model, its parts, and its cache."""
