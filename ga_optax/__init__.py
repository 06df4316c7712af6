"""Gradient accumulation for JAX and Optax."""

from ga_optax import accumulator

__all__ = ["accumulator"]
