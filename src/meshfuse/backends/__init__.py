"""Compilers of local kernels that are optional: each is imported only by who asks for it."""
