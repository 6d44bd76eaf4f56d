"""memjax: read documents of any length with a bounded memory, and train models to do it, in JAX."""

__version__ = "0.1.0"
