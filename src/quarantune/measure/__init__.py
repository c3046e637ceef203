"""Timing and judging one config: clocks, samples, finals, comparison of outputs."""
