"""Stages of MuSe as Triton kernels, and as the eager references that they are named after and that run elsewhere."""
