"""Metrics: what an answer is worth."""
