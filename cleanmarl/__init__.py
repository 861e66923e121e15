"""Single-file deep and multi-agent reinforcement learning in PyTorch."""

__version__ = "0.1.0"
