"""Sweeps over the paper's experiments, figures and tables, probes of the memory, and timings."""
