"""vesuvius: train 3D diffusion models on patches of huge chunked CT volumes."""

__version__ = "0.1.0.dev0"
