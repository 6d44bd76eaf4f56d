"""Sampling from models: the engine, its scheduler, and clients over it or over any OpenAI-compatible service."""
