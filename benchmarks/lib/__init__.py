"""What the benchmarks share: the libraries they compare, models, measurement, output."""
