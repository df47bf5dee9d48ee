"""Scaled dot product attention: its ops, kernels and gradients, its forms by blocks of columns and in a ring."""
