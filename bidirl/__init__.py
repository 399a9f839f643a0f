"""Model, plan, simulate and run asynchronous RL post-training with bidirectional borrowing."""

__version__ = "0.1.0"
__all__ = ["__version__"]
