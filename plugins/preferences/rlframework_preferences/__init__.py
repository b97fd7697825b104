"""Training on preferences: DPO and its variants, and reward models, with the environment of their data."""

__version__ = "0.2.0"
