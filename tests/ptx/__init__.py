"""Executes the PTX that nvcc writes for the product's kernels, on a CPU."""
