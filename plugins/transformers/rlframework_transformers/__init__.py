"""The generation engine `transformers`: it decodes with the trainer's own weights, or in processes of its own."""

__version__ = "0.2.0"
